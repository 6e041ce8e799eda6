import asyncio

from mcp.client import Client


async def main() -> None:
    async with Client("http://localhost:8000/mcp") as client:
        print([tool.name for tool in (await client.list_tools()).tools])
        await client.call_tool("put", {"item": "pear"})
        result = await client.call_tool("put", {"item": "apple"})
        print(result.structured_content, result.is_error)


asyncio.run(main())
