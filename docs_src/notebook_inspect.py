# %% [markdown]
# # Inspect rollouts
#
# A scripted model works on a task in a sandbox; replace it with `Model(base_url=..., name=...)` for a real one. The
# store keeps the outcome, every model call and the changed files.

# %%
import tempfile

from openenv.rollout import Model, RolloutStore, Task, run_many
from openenv.rollout.capture.transcript import transcript
from openenv.rollout.store.exports import recording
from openenv.testing import Script, ScriptedModel, Turn

task = Task(
    task_id="product",
    instruction="Write 6 * 7 into answer.txt.",
    verify=('[ "$(cat answer.txt)" = 42 ]',),
    metadata={"answer": "answer.txt"},
)
store = RolloutStore(tempfile.mkdtemp())
for answer in ("42", "It is 43."):
    with ScriptedModel(Script(turns=[Turn(text=answer)])) as scripted:
        model = Model(**scripted.model())
        outcomes = run_many([task, task], agent="single-turn", model=model, store=store, concurrency=2)
print([row.reward for row in store.find(order="oldest")])

# %% [markdown]
# The last outcome, as a table: status, reward, trust of the check, and how long each phase took.

# %%
outcomes[-1]

# %% [markdown]
# Its conversation, with the sampled tokens:

# %%
captured = recording(store, store.get(outcomes[-1].rollout_id))
for turn in transcript(captured).turns:
    print(turn.reply.parts[0].text)
    print(turn.sampled_tokens, "tokens sampled,", turn.trained_tokens, "to train on")

# %% [markdown]
# Figures of the whole store. `openenv view FOLDER` shows the same in a browser.

# %%
for figures in store.stats(by="task"):
    print(figures)

# %%
store.close()
