import asyncio

from openenv.client.llm_client import OpenAIClient
from openenv.testing import Script, ScriptedCall, ScriptedModel, Turn

# region: script
script = Script(
    name="write_note",
    turns=(
        Turn(
            text="I write the file.",
            calls=(
                ScriptedCall(name="write", arguments={"path": "${cwd}/note.txt", "text": "for ${task:for (\\w+)}"}),
            ),
        ),
        Turn(text="Done: ${result}"),
    ),
)
# endregion

TOOL = {"name": "write", "inputSchema": {"type": "object", "properties": {"path": {}, "text": {}}}}


# region: ask
async def main() -> None:
    with ScriptedModel(script) as model:
        client = OpenAIClient(model.url, None, model.name)
        messages = [
            {"role": "system", "content": "Working directory: /home/user"},
            {"role": "user", "content": "Write a note for Ada"},
        ]
        answer = await client.complete_with_tools(messages, [TOOL])
        (call,) = answer.tool_calls
        print(answer.content, call.name, call.args)
        messages += [answer.to_message_dict(), {"role": "tool", "tool_call_id": call.id, "content": "12 bytes"}]
        print((await client.complete_with_tools(messages, [TOOL])).content)
        first, second = model.played()
        known = first.prompt_ids + first.token_ids
        print(second.prompt_ids[: len(known)] == known)
        await client.aclose()


# endregion
asyncio.run(main())
