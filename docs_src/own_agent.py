from openenv.rollout import Agent, AgentRun, Launch, Model, Task, run_rollout
from openenv.sandboxes import Sandbox
from openenv.testing import Script, ScriptedModel, Turn

PROGRAM = """
import json, os, urllib.request
body = {"model": os.environ["MODEL"], "messages": [{"role": "user", "content": open("/home/user/task.md").read()}]}
request = urllib.request.Request(os.environ["URL"] + "/chat/completions", json.dumps(body).encode())
request.add_header("Authorization", "Bearer " + os.environ["KEY"])
request.add_header("Content-Type", "application/json")
answer = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
open("answer.txt", "w").write(answer)
"""


class OneQuestion(Agent):
    """Ask the model once and write its answer to a file."""

    name = "one-question"

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        """Write the agent's files and return its start command."""
        sandbox.write_text(f"{run.home}/agent.py", PROGRAM)
        sandbox.write_text(f"{run.home}/task.md", run.task.instruction)
        envs = {"URL": run.base_url, "KEY": run.api_key, "MODEL": run.model}
        return Launch(argv=("python3", f"{run.home}/agent.py"), envs=envs)


task = Task(instruction="What is the capital of France?", verify=("grep -q Paris answer.txt",))
with ScriptedModel(Script(name="geography", turns=(Turn(text="It is Paris."),))) as server:
    model = Model(base_url=server.url, name=server.name, api_key="stays on the host")
    outcome = run_rollout(task, agent=OneQuestion(), model=model)

print(outcome.status, outcome.reward)
turn = outcome.turns[0]
print(turn.completion_tokens)
print(len(turn.completion_token_ids) == len(turn.per_token_logps) == len(turn.completion_tokens))
