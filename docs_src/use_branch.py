from openenv.rollout import Model, RolloutStore, Sampling, StoredRollout, Task, run_many
from openenv.rollout.agents.shell_chat import ShellChat
from openenv.testing import Script, ScriptedModel, Turn
from openenv.train import SampleGroup

task = Task(instruction="Count the files here.", files={"a.txt": "1"}, verify=("true",), task_id="count")
script = Script(turns=(Turn(text="ls"), Turn(text="ls | wc -l")), ending="exit")
with ScriptedModel(script) as server, RolloutStore("runs/branches") as store:
    model = Model(**server.model(), sampling=Sampling().parameters())
    [outcome] = run_many([task], agent=ShellChat(), model=model, store=store, resume=True)
    rollout = StoredRollout(store, outcome.rollout_id)
    branches = rollout.branch(call=2, samples=4, agent=ShellChat(), model=model)
    group = SampleGroup.of(branches)
    print(group.rewards, group.advantages())
