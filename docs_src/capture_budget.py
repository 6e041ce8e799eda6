import contextlib
import tempfile
from pathlib import Path

import httpx2

from openenv.rollout.capture import CaptureServer, export, read
from openenv.rollout.tasks.task import Budget, Model, Sampling
from openenv.testing import Script, ScriptedModel, Turn

root = Path(tempfile.mkdtemp())
stack = contextlib.ExitStack()
endpoint = stack.enter_context(ScriptedModel(Script(turns=(Turn(text="Two."),))))
proxy = stack.enter_context(CaptureServer(root))

# region: budget
model = Model(base_url=endpoint.url, name=endpoint.name, sampling=Sampling())
capture = proxy.open("rollout-1", model, budget=Budget(max_calls=1), metadata={"task": "sum"})
ask = {"max_tokens": 100, "messages": [{"role": "user", "content": "1 + 1?"}]}
for _ in range(2):
    reply = httpx2.post(f"{proxy.url}/v1/messages", headers={"x-api-key": capture.key}, json=ask)
    print(reply.json()["content"][0]["text"], reply.json()["stop_reason"])
stats = capture.stats()
print(stats.calls, stats.budget_exhausted, stats.budget_stops, stats.last_error)
# endregion
stack.close()

# region: read
recording = read(root / "rollout-1")  # from disk, even if the proxy was killed
document = export.document(recording)
print(document["capture_level"], document["trainable"], document["stats"]["n_trainable_tokens"])
print([finding["code"] for finding in document["validation"]])
export.write_jsonl(root / "rollouts.jsonl", [recording])
# endregion
