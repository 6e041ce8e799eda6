"""Recorded answers: a resumed rollout and a branch get them again, and nothing is sampled twice."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from openenv.errors import CaptureError
from openenv.rollout.capture import Capture, CaptureServer, export, records
from openenv.rollout.capture.model_call import _begin_sync
from openenv.rollout.capture.records import FILE, SHARED, Recorder
from openenv.rollout.tasks.task import BranchPoint, Budget, Model
from waiting import wait_until


class Conversation:
    """A rollout at the proxy, and an agent that continues one conversation."""

    def __init__(self, capture: Capture, agent: Any) -> None:
        self.capture, self.agent = capture, agent

    def ask(self, count: int, *, stream: bool = False, tool: str = "result") -> list[str]:
        """Make so many calls from the start of a conversation; return the answers."""
        messages, answers = [{"role": "user", "content": "task"}], []
        for number in range(count):
            body: dict[str, Any] = {"messages": messages, "seed": 1}
            if stream:
                chunks = self.agent.chat_stream(**body)
                text = "".join(each["choices"][0]["delta"].get("content") or "" for each in chunks if each["choices"])
            else:
                reply = self.agent.chat(**body)
                assert reply.status_code == 200, reply.text
                text = reply.json()["choices"][0]["message"]["content"]
            answers.append(text)
            messages = [
                *messages,
                {
                    "role": "assistant",
                    "content": text,
                    "ids": [int(each[1:]) for each in text.split() if each[1:].isdigit()],
                },
                {"role": "user", "content": f"{tool} {number}"},
            ]
        return answers


@pytest.fixture
def conversation(server: CaptureServer, engine: Any, fake: Any, agent_of: Any) -> Callable[..., Conversation]:
    """Open a rollout, or go on with one; each new answer of the endpoint has other tokens."""
    engine.respond = lambda asked: fake.vllm([len(engine.requests), 100 + len(asked.body["messages"])])(asked)

    def opened(
        rollout_id: str, start: BranchPoint | None = None, *, again: bool = False, budget: Budget | None = None
    ) -> Conversation:
        model = Model(base_url=engine.url, name="m")
        if start is None and not again:
            capture = server.open(rollout_id, model, budget=budget)
        else:
            capture = server.reopen(rollout_id, model, start=start, budget=budget)
        return Conversation(capture, agent_of(capture))

    return opened


def kill(first: Conversation, *, cut: int | None = None) -> None:
    """End a rollout as a killed process leaves it: nothing is written after `cut` bytes."""
    file = first.capture.path / FILE
    data = file.read_bytes()
    first.capture.close()
    file.write_bytes(data if cut is None else data[:cut])


class Disk:
    """A disk whose writes are counted, and fail if asked to. A machine that crashes has the bytes of the last write."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.durable: bytes = b""
        self.is_broken, self.writes = False, 0
        monkeypatch.setattr(records, "_fdatasync", self._sync)

    def _sync(self, handle: int) -> None:
        if self.is_broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        self.writes += 1
        self.durable = Path(f"/proc/self/fd/{handle}").read_bytes()


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads the file of a descriptor")
@pytest.mark.parametrize("server", [{"is_durable": True}], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
def test_the_disk_has_an_answer_before_its_agent_does(
    conversation: Any, engine: Any, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    disk = Disk(monkeypatch)
    monkeypatch.setattr(records, "SYNC_S", 0.0)
    first = conversation("r")
    answers = first.ask(3, stream=stream)
    durable = disk.durable
    assert durable.count(b'"how":"complete"') == 3
    disk.is_broken = True
    reply = first.agent.post("/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]})
    assert reply.status_code == 507
    assert "Input/output error" in str(first.capture.stats().record_failure)
    first.capture.close()
    disk.is_broken = False
    (first.capture.path / FILE).write_bytes(durable)  # as the crash of a machine leaves it
    again = conversation("r", again=True)
    assert again.ask(3, stream=stream) == answers
    assert len(engine.requests) == 4


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads the file of a descriptor")
@pytest.mark.parametrize("server", [{"is_durable": True}], indirect=True)
def test_fast_answers_share_a_write_of_the_disk(conversation: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch)
    conversation("r").ask(3)
    wait_until(lambda: disk.durable.count(b'"how":"complete"') == 3, 30, lambda: "the last answers are not written")
    assert disk.writes <= 3


def test_a_planned_write_of_the_disk_ends_with_its_server(tmp_path: Path) -> None:
    disk, recorder = ThreadPoolExecutor(1), Recorder(tmp_path / "r" / FILE, is_durable=True)
    recorder.create({"rollout_id": "r"})
    disk.shutdown()
    _begin_sync(disk, recorder)
    assert recorder.failure is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_resumed_rollout_gets_its_recorded_answers_and_samples_the_rest(
    conversation: Any, engine: Any, stream: bool
) -> None:
    first = conversation("r")
    answers = first.ask(3, stream=stream)
    kill(first)
    again = conversation("r", again=True)
    assert again.ask(5, stream=stream)[:3] == answers
    assert len(engine.requests) == 5  # three before, two after
    stats = again.capture.stats()
    assert (stats.calls, stats.replayed, stats.divergence, stats.completion_tokens) == (5, 3, None, 10)
    recording = again.capture.recording()
    assert [call.number for call in recording.calls] == [1, 2, 3, 4, 5]
    assert [call.ended for call in recording.calls] == ["complete"] * 5
    assert recording.resumed == 1
    [sequence] = export.sequences(recording)
    assert sum(sequence.loss_mask) == 10
    held = again.capture.trace()
    assert export.sequences(held) == [sequence]
    assert export.turns(held) == export.turns(recording)


@pytest.mark.parametrize("entry", range(1, 18))
@pytest.mark.parametrize("stream", [False, True])
def test_a_kill_at_any_entry_loses_no_answer_and_leaves_the_same_rollout(
    conversation: Any, engine: Any, entry: int, stream: bool
) -> None:
    undisturbed = conversation("undisturbed")
    undisturbed.ask(3, stream=stream)
    expected = [(call.number, call.request, call.ended) for call in undisturbed.capture.recording().calls]
    first = conversation("r")
    first.ask(3, stream=stream)
    data = (first.capture.path / FILE).read_bytes()
    ends = [index for index in range(len(data)) if data[index : index + 1] == b"\n"]
    cut = ends[min(entry, len(ends) - 1)] + 1 + entry % 3 * 7  # at, or in the middle of, a line
    complete = data[:cut].count(b'"how":"complete"')
    kill(first, cut=cut)
    before = len(engine.requests)
    again = conversation("r", again=True)
    again.ask(3, stream=stream)
    assert len(engine.requests) - before == 3 - again.capture.stats().replayed
    assert again.capture.stats().replayed in (complete, complete - 1)  # the cut may be inside of the end itself
    assert again.capture.stats().divergence is None
    recording = again.capture.recording()
    if again.capture.stats().replayed == complete:
        assert [(call.number, call.request["messages"][0], call.ended) for call in recording.calls] == [
            (number, request["messages"][0], ended) for number, request, ended in expected
        ]
    assert recording.torn_bytes == 0


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "a torn entry, and whole ones after it": lambda data: data.replace(b'"how":"complete"', b'"how":"com', 1),
    "a changed answer": lambda data: data.replace(b"chat.completion", b"chat.completio2", 1),
    "a lost payload": lambda data: data[: data.index(b'{"c":"', 900)] + data[data.rindex(b'{"c":"') - 40 :],
    "zeros in the middle": lambda data: data[:900] + bytes(512) + data[1412:],
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_journal_is_refused_and_nothing_of_it_is_used(conversation: Any, engine: Any, damage: str) -> None:
    """Without checksums, the calls after the damage were missing, and the rest counted as the whole rollout."""
    first = conversation("r")
    first.ask(3)
    kill(first)
    file = first.capture.path / FILE
    data = DAMAGE[damage](file.read_bytes())
    file.write_bytes(data)
    with pytest.raises(
        CaptureError, match=r"calls\.log is damaged: .*no whole entry from byte \d+ to byte \d+; run the"
    ):
        first.capture.recording()
    with pytest.raises(CaptureError, match="is damaged"):
        conversation("r", again=True)
    with pytest.raises(CaptureError, match="is damaged"):
        conversation("branch", BranchPoint("r", 1))
    assert file.read_bytes() == data, "it is kept for its owner"
    assert len(engine.requests) == 3


def test_garbage_after_the_last_whole_entry_is_dropped(conversation: Any, engine: Any) -> None:
    """A power cut leaves zeros, or a piece of what was written last."""
    first = conversation("r")
    answers = first.ask(2)
    kill(first)
    file = first.capture.path / FILE
    file.write_bytes(file.read_bytes() + bytes(700) + b"\n" + bytes(20))
    again = conversation("r", again=True)
    assert again.ask(3)[:2] == answers
    assert (len(engine.requests), again.capture.recording().torn_bytes) == (3, 0)


def test_a_rollout_can_be_interrupted_again_and_again(conversation: Any, engine: Any) -> None:
    first = conversation("r")
    answers = first.ask(1)
    kill(first)
    for count in range(2, 6):
        again = conversation("r", again=True)
        answers = [*answers, again.ask(count)[-1]]
        assert again.capture.stats().replayed == count - 1
        kill(again)
    assert len(engine.requests) == 5
    last = conversation("r", again=True)
    assert last.ask(5) == answers
    assert len(engine.requests) == 5
    assert last.capture.recording().resumed == 5
    assert len(last.capture.turns()) == 5


def test_a_divergence_is_reported_and_only_the_answers_in_use_count(conversation: Any, engine: Any) -> None:
    first = conversation("r")
    answers = first.ask(3)
    kill(first)
    again = conversation("r", again=True)
    assert again.ask(3, tool="another")[0] == answers[0]
    stats = again.capture.stats()
    assert stats.replayed == 1
    assert "'content': 'result 0'" in stats.divergence
    assert "'content': 'another 0'" in stats.divergence
    recording = again.capture.recording()
    assert [call.number for call in recording.calls] == [1, 4, 5]
    assert [note["what"] for note in recording.notes] == ["diverged"]
    assert recording.notes[0]["unused"] == 2
    [sequence] = export.sequences(recording)
    assert sequence.node_ids == [1, 4, 5]


def test_a_failed_call_is_asked_again_without_a_divergence(conversation: Any, engine: Any, fake: Any) -> None:
    respond = engine.respond
    first = conversation("r")
    first.ask(1)
    engine.respond = lambda asked: fake.Answer.json({"error": {"message": "no"}}, 400)
    with pytest.raises(AssertionError):
        first.ask(2)
    engine.respond = respond
    kill(first)
    again = conversation("r", again=True)
    again.ask(3)
    assert again.capture.stats().divergence is None
    assert [call.ended for call in again.capture.recording().calls] == ["complete"] * 3


def test_budgets_count_once(conversation: Any, engine: Any) -> None:
    budget = Budget(max_calls=4, max_completion_tokens=100, max_seconds=1000)
    first = conversation("r", budget=budget)
    first.ask(3)
    first.capture.rollout.spending.skip_to(600.0)
    first.ask(1)
    assert first.capture.stats().calls == 4
    kill(first)
    again = conversation("r", again=True, budget=budget)
    again.ask(3)
    assert again.capture.stats().seconds < 100
    again.ask(1)  # the fourth call was made after 600 s
    stats = again.capture.stats()
    assert 600 <= stats.seconds < 700
    assert stats.skipped_s >= 500
    assert (stats.calls, stats.completion_tokens, stats.budget_exhausted) == (4, 8, "calls")
    again.ask(2)
    assert again.capture.stats().budget_stops == 2


def test_eight_branches_share_the_answers_of_their_parent(conversation: Any, engine: Any) -> None:
    parent = conversation("parent")
    answers = parent.ask(6)
    size = (parent.capture.path / FILE).stat().st_size
    branches = [conversation(f"branch{number}", BranchPoint("parent", 4)) for number in range(8)]
    for branch in branches:
        assert branch.ask(6)[:4] == answers[:4]
        assert branch.capture.stats().divergence is None
    assert len(engine.requests) == 6 + 8 * 2
    for branch in branches:
        recording = branch.capture.recording()
        assert [call.number for call in recording.calls] == [1, 2, 3, 4, 5, 6]
        assert recording.parent == {"rollout_id": "parent", "call": 4, "items": recording.parent["items"]}
        assert recording.calls[5].request["messages"][:9] == parent.capture.calls()[5].request["messages"][:9]
        assert recording.calls[4].completion.prompt_ids[:8] == parent.capture.calls()[4].completion.prompt_ids[:8]
        [sequence] = export.sequences(recording)
        assert [SHARED in each for each in (call.not_trainable for call in recording.calls)] == [True] * 4 + [False] * 2
        assert sum(sequence.loss_mask) == 4  # two tokens in each of its own two answers
        assert (branch.capture.path / FILE).stat().st_size < size
        assert export.sequences(branch.capture.trace()) == [sequence]


def test_a_branch_of_a_branch_and_a_resumed_branch(conversation: Any, engine: Any) -> None:
    conversation("a").ask(4)
    second = conversation("b", BranchPoint("a", 2))
    answers = second.ask(4)
    third = conversation("c", BranchPoint("b", 3))
    assert third.ask(5)[:3] == answers[:3]
    kill(third)
    before = len(engine.requests)
    again = conversation("c", BranchPoint("b", 3), again=True)
    again.ask(6)
    assert len(engine.requests) == before + 1
    recording = again.capture.recording()
    assert [call.number for call in recording.calls] == [1, 2, 3, 4, 5, 6]
    assert [SHARED in call.not_trainable for call in recording.calls] == [True] * 3 + [False] * 3


def test_a_branch_that_was_killed_before_its_first_entry_is_still_a_branch(conversation: Any, engine: Any) -> None:
    answers = conversation("a").ask(4)
    kill(conversation("b", BranchPoint("a", 2)), cut=20)
    again = conversation("b", BranchPoint("a", 2), again=True)
    assert again.ask(4)[:2] == answers[:2]
    assert again.capture.recording().parent["call"] == 2


def test_a_branch_may_begin_before_the_first_call(conversation: Any, engine: Any) -> None:
    conversation("a").ask(2)
    branch = conversation("b", BranchPoint("a", 0))
    branch.ask(2)
    assert len(engine.requests) == 4
    assert len(branch.capture.turns()) == 2


def test_records_that_cannot_be_continued_are_refused(conversation: Any, tmp_path: Path) -> None:
    first = conversation("r")
    first.ask(1)
    with pytest.raises(CaptureError, match="already"):
        conversation("r", again=True)  # it is still open
    first.capture.close()
    with pytest.raises(CaptureError, match="Cannot read"):
        conversation("new", BranchPoint("missing", 1))
    (first.capture.path / FILE).write_bytes(b'{"k":"call","n":1}\n')
    with pytest.raises(CaptureError, match="does not hold records"):
        conversation("r", again=True)
    (first.capture.path / FILE).write_bytes(b'{"k":"open","v"')  # killed during the first entry
    conversation("r", again=True).ask(1)
    lines = (first.capture.path / FILE).read_bytes().splitlines()
    assert json.loads(lines[0])["k"] == "open"
