import tempfile

from fastmcp import FastMCP

from opencode_env import OpenCodeAdapter, OpenCodeConfig
from openenv.adapters.turns import HarnessAction, HarnessEnvironment
from openenv.testing import Script, ScriptedCall, ScriptedModel, Turn

shelf: list[str] = []
tools: FastMCP = FastMCP("shop")


@tools.tool
def put(item: str) -> int:
    """Put an item on the shelf."""
    shelf.append(item)
    return len(shelf)


script = Script(
    turns=(
        Turn(calls=(ScriptedCall(name="environment_put", arguments={"item": "pear"}),)),
        Turn(text="There is ${result}."),
        Turn(text="A pear."),
    )
)
with ScriptedModel(script) as model:  # or any endpoint with chat completions
    config = OpenCodeConfig(base_url=model.url, model=model.name)
    adapter = OpenCodeAdapter(config, working_directory=tempfile.mkdtemp())
    env = HarnessEnvironment(adapter, mcp=tools)
    env.reset()
    for message in ("Put a pear on the shelf.", "What is there?"):
        print(env.step(HarnessAction(message=message)).metadata["response"])
    env.close()
print(shelf)
