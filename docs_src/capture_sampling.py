import contextlib
import tempfile
from pathlib import Path

import httpx2

from openenv.rollout.capture import CaptureServer
from openenv.rollout.tasks.task import Model, Sampling
from openenv.testing import Script, ScriptedModel, Turn

stack = contextlib.ExitStack()
endpoint = stack.enter_context(ScriptedModel(Script(turns=(Turn(text="Two."),))))
proxy = stack.enter_context(CaptureServer(Path(tempfile.mkdtemp())))

# region: sampling
model = Model(
    base_url=endpoint.url,
    name=endpoint.name,
    engine="vllm",  # validates the names in `sampling`; omit it for other engines
    sampling=Sampling(temperature=1.0, top_k=20),  # all parameters, sent with every call
    agent_may_set=("seed",),  # parameters that the agent may set
)
capture = proxy.open("rollout-1", model)
ask = {"messages": [{"role": "user", "content": "1 + 1?"}], "temperature": 0, "seed": 7, "grammar": "root ::= x"}
forced = {"messages": [{"role": "user", "content": "1 + 1, by a tool?"}], "tool_choice": "required"}
for body in (ask, forced):
    httpx2.post(f"{proxy.url}/v1/chat/completions", headers={"x-api-key": capture.key}, json=body)
for call, sequence in zip(capture.calls(), capture.sequences(), strict=True):
    print(call.sent["temperature"], call.sent.get("seed"), call.removed, call.not_trainable, sequence.n_trainable)
# endregion
stack.close()
