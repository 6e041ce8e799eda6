import asyncio

from fastmcp import Client


async def show(progress: float, total: float | None, message: str | None) -> None:
    print(f"{progress:g} of {total:g}")


async def main() -> None:
    async with Client("http://localhost:8000/mcp") as client:
        await client.call_tool("put", {"item": "pear"})
        await client.call_tool("put", {"item": "apple"})
        print((await client.call_tool("sort", progress_handler=show)).data)


asyncio.run(main())
