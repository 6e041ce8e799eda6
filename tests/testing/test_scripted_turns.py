"""Scripted models play the right turn for every conversation, with exact ids, in every dialect."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from openenv.testing import Script, ScriptedCall, ScriptedModel, Turn
from openenv.testing.scripted import agent_scripts as scripts
from openenv.testing.scripted import vocabulary

Start = Callable[..., ScriptedModel]
Speak = Callable[..., Any]

ALL = [(dialect, stream) for dialect in ("openai_chat", "openai_responses", "anthropic") for stream in (True, False)]


@pytest.mark.parametrize(("dialect", "stream"), ALL)
def test_a_whole_conversation_is_played_and_each_prompt_extends_the_last(
    scripted: Start, speak: Speak, dialect: str, stream: bool
) -> None:
    model = scripted()
    agent = speak(model, dialect, stream=stream)
    agent.say("please work")
    first = agent.ask()
    assert first.text == "I will write it."
    assert [(name, arguments) for _, name, arguments in first.calls] == [
        ("write", {"path": "ü.py", "body": "x = 'ü'\n"})
    ]
    assert first.finish == "tool_calls"
    agent.results(first, "written")
    second = agent.ask()
    assert [name for _, name, _ in second.calls] == ["run", "look"]
    assert second.calls[0][2] == {"b": 2, "a": [1, {"c": None}]}
    agent.results(second)
    third = agent.ask()
    assert (third.text, third.calls, third.finish) == ("All done — bye.", [], "stop")
    for before, after in ((first, second), (second, third)):
        history = before.prompt_ids + before.token_ids
        assert after.prompt_ids[: len(history)] == history
    for reply in (first, second, third):
        assert len(reply.token_ids) == len(reply.logprobs) > 0
        assert all(chance < 0 for chance in reply.logprobs)
        assert reply.token_ids[-1] == vocabulary.END
    assert vocabulary.decode(third.token_ids, special=False) == "All done — bye."


@pytest.mark.parametrize("dialect", ["openai_chat", "openai_responses", "anthropic"])
def test_a_stream_says_what_one_body_says(scripted: Start, speak: Speak, dialect: str) -> None:
    model = scripted()
    streamed, whole = (speak(model, dialect, stream=stream) for stream in (True, False))
    for agent in (streamed, whole):
        agent.say("please work")
    one, other = streamed.ask(), whole.ask()
    assert (one.text, one.calls, one.finish) == (other.text, other.calls, other.finish)
    assert (one.prompt_ids, one.token_ids, one.logprobs) == (other.prompt_ids, other.token_ids, other.logprobs)


def test_a_repeated_request_gets_the_same_answer(scripted: Start, speak: Speak) -> None:
    agent = speak(scripted())
    agent.say("please work")
    first, again = agent.try_ask(), agent.try_ask()
    assert (first.calls, first.token_ids, first.logprobs) == (again.calls, again.token_ids, again.logprobs)


def test_an_answer_that_was_cut_off_is_played_again(scripted: Start, speak: Speak) -> None:
    agent = speak(scripted())
    agent.say("please work")
    agent.history.append({"role": "assistant", "content": "I will"})
    agent.say("go on")
    assert agent.ask().calls[0][1] == "write"


def test_after_the_last_turn_comes_the_ending(scripted: Start, speak: Speak) -> None:
    agent = speak(scripted(Script(turns=(Turn(text="one"),), ending="That was all.")))
    agent.say("hello")
    assert agent.ask().text == "one"
    agent.say("and now?")
    assert [agent.ask().text, agent.try_ask().text] == ["That was all."] * 2


def test_many_conversations_at_once_are_never_mixed_up(scripted: Start, speak: Speak) -> None:
    script = Script(
        turns=(
            Turn(calls=(ScriptedCall(name="write", arguments={"body": "number ${task:number (\\d+)}"}),)),
            Turn(text="Wrote ${task:number (\\d+)}: ${result}"),
        )
    )
    model = scripted(script)

    def converse(number: int) -> None:
        agent = speak(model, ALL[number % 6][0], stream=ALL[number % 6][1])
        agent.say(f"write number {number}")
        reply = agent.ask()
        assert reply.calls[0][2] == {"body": f"number {number}"}
        agent.results(reply, f"result {number}")
        assert agent.ask().text == f"Wrote {number}: result {number}"

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(converse, range(60)))


def test_a_request_without_tools_gets_a_harmless_answer_when_the_script_calls_tools(
    scripted: Start, speak: Speak
) -> None:
    agent = speak(scripted())
    agent.tools = []
    agent.say("Make a title")
    reply = agent.ask()
    assert (reply.text, reply.calls, reply.finish) == ("Scripted answer", [], "stop")
    schema = {"type": "object", "properties": {"title": {"type": "string"}, "new": {"type": "boolean"}}}
    answer_format = {"type": "json_schema", "json_schema": {"schema": {**schema, "required": ["title", "new"]}}}
    assert agent.try_ask(response_format=answer_format).text == '{"new":false,"title":"Scripted answer"}'


def test_a_script_of_texts_is_played_without_tools(scripted: Start, speak: Speak) -> None:
    agent = speak(scripted(Script(turns=(Turn(text="```bash\nls\n```"), Turn(text="bye")))))
    agent.tools = []
    agent.say("list the files")
    assert agent.ask().text == "```bash\nls\n```"
    agent.say("a.txt")
    assert agent.ask().text == "bye"


def test_scripts_are_chosen_by_the_models_name_or_by_a_key_in_the_task(scripted: Start, speak: Speak) -> None:
    model = scripted(
        [
            Script(name="one", turns=(Turn(text="I am one"),)),
            Script(name="two", turns=(Turn(text="I am two"),)),
            Script(name="keyed", key="[apples]", turns=(Turn(text="apples!"), Turn(text="more apples!"))),
        ]
    )

    def first_words(name: str, task: str) -> str:
        agent = speak(model, name=name)
        agent.say(task)
        return str(agent.ask().text)

    assert first_words("scripted/one", "hello") == "I am one"
    assert first_words("two", "hello") == "I am two"
    assert first_words("vendor/scripted/two", "hello") == "I am two"
    assert first_words("some-model", "count the [apples]") == "apples!"
    assert first_words("some-model", "hello") == "I am one"


def test_a_key_that_comes_again_begins_the_script_again(scripted: Start, speak: Speak) -> None:
    agent = speak(scripted(Script(key="TASK", turns=(Turn(text="first"), Turn(text="second")))))
    agent.say("TASK a")
    assert agent.ask().text == "first"
    agent.say("go on")
    assert agent.ask().text == "second"
    agent.say("TASK b")
    assert agent.ask().text == "first"


def test_placeholders_are_filled_and_the_shells_own_stay(scripted: Start, speak: Speak) -> None:
    command = "cd ${cwd} && echo ${HOME} ${turn} '${task:file (\\w{1,9})}' ${model}"
    agent = speak(
        scripted(Script(name="s", turns=(Turn(calls=(ScriptedCall(name="run", arguments={"c": command}),)),)))
    )
    agent.history.append({"role": "system", "content": "You code.\n  Working directory: /srv/box\n  Platform: linux"})
    agent.say("make file abc now")
    assert agent.ask().calls[0][2] == {"c": "cd /srv/box && echo ${HOME} 0 'abc' scripted/s"}


def test_max_tokens_cuts_an_answer_off(scripted: Start, speak: Speak) -> None:
    for stream in (True, False):
        agent = speak(scripted(Script(turns=(Turn(text="one two three four five six"),))), stream=stream)
        agent.say("count")
        whole, cut = agent.try_ask(), agent.try_ask(max_tokens=4)
        assert (whole.finish, cut.finish) == ("stop", "length")
        assert len(cut.token_ids) == len(cut.logprobs) == 4
        assert cut.token_ids == whole.token_ids[:4]
        assert whole.text.startswith(cut.text)


@pytest.mark.slow
def test_two_hundred_streams_at_once_are_all_complete(scripted: Start, speak: Speak) -> None:
    model = scripted(Script(turns=(Turn(text="a word and another one " * 5, token_delay_s=0.002),)))
    ready = threading.Barrier(200, timeout=60)

    def stream(number: int) -> list[int]:
        agent = speak(model)
        agent.say(f"talk {number}")
        ready.wait()
        return list(agent.ask().token_ids)

    with ThreadPoolExecutor(200) as pool:
        ids = list(pool.map(stream, range(200)))
    assert len({tuple(one) for one in ids}) == 1
    played = model.played()
    assert len(played) == 200
    assert all(one.finished and one.token_ids == ids[0] for one in played)


@pytest.mark.parametrize("agent", sorted(scripts.AGENTS))
def test_ready_scripts_write_a_binary_search_that_works(agent: str) -> None:
    script = scripts.binary_search(agent)
    call = script.turns[0].calls[0]
    assert isinstance(call.arguments, dict)
    written = "\n".join(str(value) for value in call.arguments.values())
    assert scripts.BINARY_SEARCH in written
    names: dict[str, Any] = {}
    exec(scripts.BINARY_SEARCH, names)
    assert [names["binary_search"]([1, 3, 5], value) for value in (1, 3, 5, 4)] == [0, 1, 2, -1]
