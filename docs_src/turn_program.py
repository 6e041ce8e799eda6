import tempfile

from openenv.adapters.turns import CommandAdapter, HarnessAction, HarnessConfig, HarnessEnvironment

config = HarnessConfig(name="shouter", command=["tr", "a-z", "A-Z"], working_directory=tempfile.mkdtemp())
env = HarnessEnvironment(CommandAdapter(config))
env.reset()
for message in ("hello", "good bye"):
    turn = env.step(HarnessAction(message=message))
    print(turn.metadata["turn_number"], turn.metadata["response"])
env.close()
