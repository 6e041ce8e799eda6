"""An agent with a loop of its own: it asks its model until an answer says `done`, and writes the answers down."""

from __future__ import annotations

from openenv.rollout import Agent, AgentRun, Launch
from openenv.sandboxes import Sandbox

PROGRAM = """
import json, os, urllib.request
messages = [{"role": "user", "content": open(os.environ["HOME"] + "/task.md").read()}]
answer = ""
for number in range(9):
    body = {"model": os.environ["MODEL"], "messages": messages, "temperature": 0.1}
    request = urllib.request.Request(os.environ["URL"] + "/chat/completions", json.dumps(body).encode())
    request.add_header("Authorization", "Bearer " + os.environ["KEY"])
    request.add_header("Content-Type", "application/json")
    answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "result %d" % number}]
    open("answers.txt", "a").write(answer + "\\n")
    if "done" in answer:
        break
"""


class AskingAgent(Agent):
    """Asks, and asks again with what it was told and a result."""

    name = "asking"

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Write the program, and return the command that starts it."""
        sandbox.write_text(f"{run.home}/agent.py", PROGRAM)
        sandbox.write_text(f"{run.home}/task.md", run.task.instruction)
        envs = {"URL": run.base_url, "KEY": run.api_key, "MODEL": run.model, "HOME": run.home}
        return Launch(argv=("python3", f"{run.home}/agent.py"), envs=envs)
