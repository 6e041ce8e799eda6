import contextlib

import httpx2

from openenv.core.harness.capture import CaptureServer, to_training_trace
from openenv.core.harness.capture.export import export_session
from openenv.testing import Script, ScriptedModel, Turn

stack = contextlib.ExitStack()
endpoint = stack.enter_context(ScriptedModel(Script(turns=(Turn(text="Two."),))))

# region: session
server = CaptureServer(llm_url=endpoint.url, model=endpoint.name, port=0)
server.start()
session = server.registry.create(sampling={"temperature": 1.0}, max_model_calls=20, task="sum")
reply = httpx2.post(  # the agent's request; its key is the session ID
    f"{server.url}/v1/chat/completions",
    headers={"authorization": f"Bearer {session.session_id}"},
    json={"model": "any", "messages": [{"role": "user", "content": "1 + 1?"}]},
)
print(reply.json()["choices"][0]["message"]["content"])
document = export_session(session)
(turn,) = to_training_trace(session.graph, document).turns
print(document["trainable"], len(turn.completion_token_ids), sum(turn.loss_mask))
server.stop()
# endregion
stack.close()
