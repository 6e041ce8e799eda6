"""Cassettes: recorded calls are played back as they were, keys are never written, and a miss says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import pytest

import openenv
from openenv.llm.cassettes import Cassette, CassetteError, CassetteMiss, CassettePlayer, CassetteRecorder
from openenv.llm.scripted import CutFailure, Script, ScriptedModel, StatusFailure, Turn

Start = Callable[..., ScriptedModel]

KEY = "sk-real-and-secret"


def chat(text: str, **more: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}], **more}


def post(http: httpx2.Client, url: str, body: dict[str, Any], **headers: str) -> httpx2.Response:
    return http.post(f"{url}/chat/completions", json=body, headers=headers)


@pytest.mark.parametrize("stream", [True, False])
def test_what_was_recorded_is_played_byte_by_byte(
    scripted: Start, http: httpx2.Client, tmp_path: Path, stream: bool
) -> None:
    model = scripted(Script(turns=(Turn(text="wörds — and more"),)))
    body = chat("hello", stream=stream, logprobs=True, return_token_ids=True)
    with CassetteRecorder(model.url, tmp_path / "one.jsonl") as recorder:
        live = post(http, recorder.url, body)
    model.close()
    with CassettePlayer(tmp_path / "one.jsonl") as player:
        played = post(http, player.url, body)
        player.check()
        assert player.played == 1
    assert played.content == live.content
    assert played.headers["content-type"] == live.headers["content-type"]
    assert played.headers["x-openenv-model"] == "scripted"


def test_a_stream_is_passed_on_as_it_comes_and_played_in_its_own_time(
    scripted: Start, http: httpx2.Client, tmp_path: Path
) -> None:
    model = scripted(Script(turns=(Turn(text="one two three four", token_delay_s=0.1),)))
    body = chat("hello", stream=True)

    def arrivals(url: str) -> list[float]:
        began, times = time.monotonic(), []
        with http.stream("POST", f"{url}/chat/completions", json=body) as response:
            for _ in response.iter_raw():
                times.append(time.monotonic() - began)
        return times

    with CassetteRecorder(model.url, tmp_path / "one.jsonl") as recorder:
        live = arrivals(recorder.url)
    recorded = Cassette(tmp_path / "one.jsonl").recordings[0]
    assert len(recorded.pieces) > 5
    assert live[-1] - live[0] > 0.08
    with CassettePlayer(tmp_path / "one.jsonl", speed=1.0) as timed:
        played = arrivals(timed.url)
    assert len(played) > 5
    assert played[-1] - played[0] > 0.08


def test_no_key_is_ever_written(scripted: Start, http: httpx2.Client, tmp_path: Path) -> None:
    model = scripted(Script(turns=(Turn(text=f"your key is {KEY}, they say"),)), api_key=KEY)
    file = tmp_path / "one.jsonl"
    with CassetteRecorder(model.url, file, api_key=KEY) as recorder:
        for headers in ({}, {"authorization": "Bearer agent-key-of-rollout"}, {"x-api-key": "agent-key-of-rollout"}):
            reply = post(http, recorder.url, chat("hello agent-key-of-rollout"), **headers)
            assert reply.status_code == 200, reply.text
            assert KEY in reply.text
        streamed = post(http, recorder.url, chat("hi", stream=True), authorization="Bearer other-agent-key")
        assert streamed.status_code == 200
        http.get(f"{recorder.url}/models?key=query-secret&limit=3")
    with CassetteRecorder(model.url, file) as recorder:
        assert post(http, recorder.url, chat("own key"), authorization=f"Bearer {KEY}").status_code == 200
    text = file.read_text()
    for secret in (KEY, "other-agent-key", "query-secret", "uthorization"):
        assert secret not in text
    assert text.count("agent-key-of-rollout") == 1  # in the request that came without any key: there it is only a text
    assert '"/v1/models?limit=3"' in text


def test_the_same_request_again_plays_the_next_recording(scripted: Start, http: httpx2.Client, tmp_path: Path) -> None:
    failing = Turn(text="yes", failures=(StatusFailure(status=429, retry_after_s=7),))
    model = scripted(Script(turns=(failing,)))
    with CassetteRecorder(model.url, tmp_path / "one.jsonl") as recorder:
        live = [post(http, recorder.url, chat("hello")).status_code for _ in range(2)]
    with CassettePlayer(tmp_path / "one.jsonl") as player:
        played = [post(http, player.url, chat("hello")) for _ in range(3)]
    assert live == [429, 200]
    assert [reply.status_code for reply in played] == [429, 200, 200]
    assert played[0].headers["retry-after"] == "7"


def test_a_miss_is_a_typed_error_that_shows_the_nearest_difference(
    scripted: Start, http: httpx2.Client, tmp_path: Path
) -> None:
    model = scripted(Script(turns=(Turn(text="yes"),)))
    with CassetteRecorder(model.url, tmp_path / "one.jsonl") as recorder:
        post(http, recorder.url, chat("write the file", temperature=0.5))
        post(http, recorder.url, chat("something else"))
    with CassettePlayer(tmp_path / "one.jsonl") as player:
        refused = post(http, player.url, chat("write the file", temperature=0.7))
        assert refused.status_code == 404
        assert refused.json()["error"]["type"] == "cassette_miss"
        with pytest.raises(CassetteMiss, match=r"body\.temperature: recorded 0\.5, asked 0\.7") as caught:
            player.check()
        assert caught.value.details["path"] == "/v1/chat/completions"
        assert isinstance(caught.value, LookupError)
        http.post(f"{player.url}/responses", json={"input": "x"})
        assert "nothing was recorded for this path" in str(player.misses[1])


def test_loose_mode_compares_only_what_was_said(scripted: Start, http: httpx2.Client, tmp_path: Path) -> None:
    model = scripted(Script(turns=(Turn(text="yes"),)))

    def request(folder: str, date: str, system: str, task: str = "write  it") -> dict[str, Any]:
        messages = [{"role": "system", "content": system}, {"role": "user", "content": f"{date} in {folder}: {task}"}]
        return {"model": "m", "messages": messages, "temperature": len(folder)}

    with CassetteRecorder(model.url, tmp_path / "one.jsonl") as recorder:
        post(http, recorder.url, request("/tmp/a1", "2026-01-02", "You code."))
    other = request("/tmp/other", "2027-03-04T05:06:07Z", "You write code.")
    with (
        CassettePlayer(tmp_path / "one.jsonl") as strict,
        CassettePlayer(tmp_path / "one.jsonl", mode="loose") as loose,
    ):
        assert post(http, strict.url, other).status_code == 404
        assert post(http, loose.url, other).status_code == 200
        assert post(http, loose.url, request("/tmp/a1", "2026-01-02", "You code.", "delete it")).status_code == 404
        assert "delete it" in str(loose.misses[0])


def test_ids_that_are_new_in_every_run_do_not_count(scripted: Start, http: httpx2.Client, tmp_path: Path) -> None:
    model = scripted(Script(turns=(Turn(text="yes"),)))

    def request(run: str) -> dict[str, Any]:
        item = {"type": "message", "id": f"msg_{run}", "role": "user", "content": "hello"}
        return {"model": "m", "input": [item], "prompt_cache_key": run, "client_metadata": {"run": run}}

    with CassetteRecorder(model.url, tmp_path / "one.jsonl") as recorder:
        http.post(f"{recorder.url}/responses", json=request("one"))
    with CassettePlayer(tmp_path / "one.jsonl") as player:
        assert http.post(f"{player.url}/responses", json=request("two")).status_code == 200


def test_an_endpoint_that_broke_off_breaks_off_again(scripted: Start, http: httpx2.Client, tmp_path: Path) -> None:
    cut = Turn(text="one two three", failures=(CutFailure(after_chunks=3, attempts=None),))
    model = scripted(Script(turns=(cut,)))
    with CassetteRecorder(model.url, tmp_path / "one.jsonl") as recorder, pytest.raises(httpx2.RemoteProtocolError):
        post(http, recorder.url, chat("hello", stream=True))
    (recording,) = Cassette(tmp_path / "one.jsonl").recordings
    assert not recording.complete
    assert recording.text.count("data: ") == 3
    with CassettePlayer(tmp_path / "one.jsonl") as player, pytest.raises(httpx2.RemoteProtocolError):
        post(http, player.url, chat("hello", stream=True))


def test_an_endpoint_that_is_not_there_is_a_502_and_no_recording(http: httpx2.Client, tmp_path: Path) -> None:
    with CassetteRecorder("http://127.0.0.1:9/v1", tmp_path / "one.jsonl") as recorder:
        reply = post(http, recorder.url, chat("hello"))
    assert (reply.status_code, reply.json()["error"]["type"]) == (502, "upstream_error")
    assert not (tmp_path / "one.jsonl").exists()


def test_a_line_that_was_cut_off_is_left_out(scripted: Start, http: httpx2.Client, tmp_path: Path) -> None:
    file = tmp_path / "one.jsonl"
    model = scripted(Script(turns=(Turn(text="yes"),)))
    with CassetteRecorder(model.url, file) as recorder:
        post(http, recorder.url, chat("hello"))
    file.write_text(file.read_text() + '{"method": "POST", "pa')
    assert len(Cassette(file).recordings) == 1


def test_what_is_no_cassette_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        CassettePlayer(tmp_path / "none.jsonl")
    for text in ("hello\n", json.dumps({"cassette": 99}) + "\n", ""):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(CassetteError):
            CassettePlayer(tmp_path / "bad.jsonl")


def test_recorder_and_player_run_as_processes(scripted: Start, http: httpx2.Client, tmp_path: Path) -> None:
    model = scripted(Script(turns=(Turn(text="yes"),)), api_key=KEY)
    environment = {**os.environ, "PYTHONPATH": str(Path(openenv.__file__).parents[1]), "MODEL_KEY": KEY}
    file = str(tmp_path / "one.jsonl")
    base = [sys.executable, "-m", "openenv.llm.cassettes"]

    def run(*arguments: str) -> tuple[int, int]:
        process = subprocess.Popen(
            [*base, *arguments], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
        )
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        status = post(http, url, chat("hello")).status_code
        process.terminate()
        process.communicate(timeout=20)
        return status, process.returncode

    assert run("record", file, "--upstream", model.url, "--api-key-env", "MODEL_KEY") == (200, 0)
    assert run("play", file) == (200, 0)
    refused = subprocess.run([*base, "play", str(tmp_path / "no")], capture_output=True, text=True, env=environment)
    assert refused.returncode == 2
    assert "no cassette" in refused.stderr
