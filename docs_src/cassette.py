import tempfile
from pathlib import Path

import httpx2

from openenv.llm.cassettes import CassetteMiss, CassettePlayer, CassetteRecorder
from openenv.llm.scripted import Script, ScriptedModel, Turn

question = {"model": "m", "messages": [{"role": "user", "content": "Who are you?"}]}
cassette = Path(tempfile.mkdtemp()) / "session.jsonl"


def ask(url: str) -> str:
    reply = httpx2.post(f"{url}/chat/completions", json=question, headers={"Authorization": "Bearer my-secret-key"})
    return str(reply.json()["choices"][0]["message"]["content"]) if reply.is_success else reply.text[:18]


with ScriptedModel(Script(turns=(Turn(text="A model."),))) as endpoint:  # in place of a real one
    recorder = CassetteRecorder(endpoint.url, cassette)
    with recorder:
        print(ask(recorder.url))

with CassettePlayer(cassette) as player:  # the endpoint is gone
    print(ask(player.url))
    question["messages"][0]["content"] = "Who am I?"
    ask(player.url)
    try:
        player.check()
    except CassetteMiss as miss:
        print(miss.nearest)
print("my-secret-key" in cassette.read_text())
