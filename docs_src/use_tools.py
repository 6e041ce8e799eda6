from openenv import MCPToolClient
from openenv.errors import ToolArgumentsError, ToolTimeout


def show(progress: float, total: float | None, message: str | None) -> None:
    print(f"{progress:g} of {total:g}")


with MCPToolClient(base_url="http://localhost:8000").sync() as env:
    env.reset()
    print([tool.name for tool in env.list_tools()])
    print(env.call_tool("put", item="pear"), env.call_tool("put", item="apple"))
    try:
        print(env.call_tool_with("sort", timeout_s=300, on_progress=show))
    except ToolTimeout:
        print("too slow, but the session goes on")
    try:
        env.call_tool("put", thing="plum")
    except ToolArgumentsError as error:
        print(error.tool_name)
