import contextlib
import tempfile

import httpx2

from openenv.rollout.capture import CaptureServer
from openenv.rollout.tasks.task import Model, Sampling
from openenv.testing import Script, ScriptedModel, Turn

stack = contextlib.ExitStack()
endpoint = stack.enter_context(ScriptedModel(Script(turns=(Turn(text="Two."),))))
proxy = stack.enter_context(CaptureServer(tempfile.mkdtemp()))

# region: open
model = Model(base_url=endpoint.url, name=endpoint.name, api_key="sk-the-real-one", sampling=Sampling(temperature=0.7))
with proxy.open("rollout-1", model) as capture:
    reply = httpx2.post(  # the agent's request
        f"{proxy.url}/v1/chat/completions",
        headers={"authorization": f"Bearer {capture.key}"},
        json={"model": "any", "messages": [{"role": "user", "content": "1 + 1?"}]},
    )
    print(reply.json()["choices"][0]["message"]["content"], "logprobs" in reply.json()["choices"][0])
    (call,) = capture.calls()
    print(call.ended, len(call.completion.prompt_ids), len(call.completion.sampled.ids))
    (sequence,) = capture.sequences()
    print(len(sequence.input_ids) == len(sequence.loss_mask) == len(sequence.logprobs), sequence.n_trainable)
    print(sequence.trainable, sequence.sampled_with("temperature"))
# endregion
stack.close()
