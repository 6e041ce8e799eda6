"""Files before model calls: recorded from outside of the sandbox, and restored for branches that skip the work."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from openenv.rollout import Model, Outcome, RolloutStore, Sampling, StoredRollout, Task, resume_rollouts, run_many
from openenv.rollout.agents.base import AgentRun, Launch, LoopTools
from openenv.rollout.agents.shell_chat import ShellChat
from openenv.rollout.capture.records import FILE, Recorder, read_entries
from openenv.rollout.run import recorded_files
from openenv.rollout.run.recorded_files import NotRestorable, RecordedFiles
from openenv.rollout.store.archives import Archive
from openenv.sandboxes import DockerSandboxes, Sandbox, Sandboxes
from openenv.testing import Script, ScriptedModel, Turn

TASK = Task(
    instruction="Work.",
    files={"base.txt": "base", "gone.txt": "gone"},
    setup=("echo set > up.txt; ln up.txt twice.txt",),
    verify=("test -s up.txt && test ! -e gone.txt",),
    task_id="work",
)
# One line for each kind of change. A draw differs in each run, so a repeated command would be noticed.
LINES = (
    "rm gone.txt; head -c 8 /dev/urandom | base64 > draw.txt; mkdir -p deep/er; echo 1 > deep/er/one",
    "ln -s ../base.txt deep/link; ln -s /etc/passwd outer; ln deep/er/one same; chmod 700 same; echo 2 > /tmp/two",
    "printf x > \"$(printf 'o\\377d\\nname')\"; mv deep/er moved; chmod 000 moved; echo more >> base.txt",
    "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"socket\")'; cat draw.txt; ls -l /tmp",
    "chmod 755 moved; cat moved/one /tmp/two base.txt > all.txt; date +%N > clock.txt",
)


def script_of(lines: Sequence[str], *, ending: str = "exit") -> Script:
    return Script(name="lines", turns=tuple(Turn(text=f"{line}; exit 1") for line in lines), ending=ending)


class Work:
    """A store, and the options of its rollouts."""

    def __init__(self, store: RolloutStore, model: ScriptedModel, local: Sandboxes) -> None:
        self.store, self.model = store, model
        endpoint = Model(**model.model(), sampling=Sampling().parameters())
        self.options: dict[str, Any] = {"agent": ShellChat(max_turns=20), "model": endpoint, "sandbox": local}

    def parent(self, task: Task = TASK, **options: Any) -> Outcome:
        [outcome] = run_many([task], **{**self.options, "store": self.store, "record_files": True, **options})
        return outcome

    def branch(self, parent: str, call: int, samples: int = 1, **options: Any) -> list[Outcome]:
        return StoredRollout(self.store, parent).branch(call=call, samples=samples, **{**self.options, **options})

    def tree(self, outcome: Outcome) -> dict[str, tuple[Any, ...]]:
        """Return kind, mode, link and content of each entry in the work folder."""
        path = self.store.live_file(outcome.rollout_id, "worktree.tar")
        with Archive(path) as archive:
            return {
                name: (member.type, member.mode, member.linkname, archive.read(member, 1 << 20))
                if member.isreg()
                else (member.type, member.mode, member.linkname)
                for name, member in archive.members
            }


@pytest.fixture
def working(local: Sandboxes, tmp_path: Path) -> Iterator[Callable[..., Work]]:
    """Make a `Work` with the given lines of the model."""
    models: list[ScriptedModel] = []
    with RolloutStore(tmp_path) as store:

        def make(lines: Sequence[str] = LINES, sandbox: Sandboxes = local, **options: Any) -> Work:
            models.append(ScriptedModel(script_of(lines, **options)))
            return Work(store, models[-1].__enter__(), sandbox)

        yield make
        for model in models:
            model.__exit__(None, None, None)


def test_branches_start_from_the_files_of_their_parent(working: Callable[..., Work]) -> None:
    work = working()
    parent = work.parent()
    assert (parent.status, parent.reward) == ("ok", 1.0)
    for call in (1, 3, 4, 6):
        [branch] = work.branch(parent.rollout_id, call)
        assert (branch.status, branch.reward, branch.trust) == ("ok", 1.0, parent.trust)
        assert branch.metadata["restored_call"] == min(call + 1, 6)
        assert branch.metadata["replayed"] == call
        assert "divergence" not in branch.metadata
        assert [turn.turn for turn in branch.turns] == [1, 2, 3, 4, 5, 6]
        tree, expected = work.tree(branch), work.tree(parent)
        if call < 5:
            del tree["clock.txt"], expected["clock.txt"]  # its command ran again
        assert tree == expected
        assert branch.setup_results == parent.setup_results
    assert len(work.model.played()) == 6 + 5 + 3 + 2 + 0


@pytest.mark.slow
def test_branches_in_containers_start_from_the_files_of_their_parent(
    working: Callable[..., Work], docker_engines: Any
) -> None:
    with contextlib.ExitStack() as stack:
        try:
            host = stack.enter_context(docker_engines.docker_engine())
        except docker_engines.EngineUnavailable as error:
            pytest.skip(str(error))
        work = working(LINES[:2], DockerSandboxes("host", engine="docker", host=host))
        task = Task(instruction="Work.", files={"base.txt": "base", "gone.txt": "gone"}, verify=("test ! -e gone.txt",))
        parent = work.parent(task)
        [branch] = work.branch(parent.rollout_id, 2)
        assert (branch.status, branch.reward, branch.metadata.get("restored_call")) == ("ok", 1.0, 3), branch.metadata
        assert work.tree(branch) == work.tree(parent)
        assert len(work.model.played()) == 3 + 1


def test_a_branch_without_recorded_files_repeats_the_work_and_says_why(working: Callable[..., Work]) -> None:
    work = working()
    parent = work.parent(record_files=False)
    [branch] = work.branch(parent.rollout_id, 2)
    assert branch.metadata["repeats_because"] == "no files were recorded"
    assert work.tree(branch)["draw.txt"] != work.tree(parent)["draw.txt"]
    assert not (work.store.captures / branch.rollout_id / "files").exists()


@pytest.mark.slow
def test_equal_answers_give_equal_trees_also_of_branches_of_branches(working: Callable[..., Work]) -> None:
    work = working()
    parent = work.parent()
    [second] = work.branch(parent.rollout_id, 2)
    [third] = work.branch(second.rollout_id, 4)
    [early] = work.branch(third.rollout_id, 1)  # from the files of the grandparent
    assert [each.metadata["restored_call"] for each in (second, third, early)] == [3, 5, 2]
    trees = [work.tree(each) for each in (parent, second, third, early)]
    for tree in trees:
        del tree["clock.txt"]
    assert trees[1:] == [trees[0]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("mkfifo pipe", "is a named pipe or a device"),
        ("head -c 70000000 /dev/zero > large", "has 70,000,000 bytes"),
        ("(sleep 60 > /dev/null 2>&1 &)", "a process runs in the background"),
        ("mkdir -p $(seq -s / 70)", "more than 64 folders in each other"),
    ],
)
def test_files_that_cannot_be_restored_are_not_recorded(working: Callable[..., Work], line: str, reason: str) -> None:
    work = working((line, "echo more > more"))
    parent = work.parent(Task(instruction="Work.", verify=("test -e more",)))
    assert parent.reward == 1.0, parent.reason
    entries = [head for head, _ in read_entries(work.store.captures / parent.rollout_id)]
    [note] = [head["why"] for head in entries if head["k"] == "files" and "why" in head]
    assert reason in note
    [branch] = work.branch(parent.rollout_id, 2)  # from the files before call 1: the rest is run again
    assert (branch.reward, branch.metadata["replayed"]) == (1.0, 2)


@pytest.mark.slow
def test_files_before_an_earlier_call_are_used_if_later_ones_are_missing(working: Callable[..., Work]) -> None:
    work = working(("head -c 8 /dev/urandom > draw; sleep 0.1", "mkfifo pipe", "rm pipe", "date +%N > end"))
    parent = work.parent(Task(instruction="Work.", verify=("test -e end",)))
    [branch] = work.branch(parent.rollout_id, 2)
    assert branch.metadata["restored_call"] == 2
    assert work.tree(branch)["draw"] == work.tree(parent)["draw"]
    [later] = work.branch(parent.rollout_id, 4)
    assert later.metadata["restored_call"] == 5


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["content", "baseline", "parent"])
def test_damaged_recordings_are_not_restored(working: Callable[..., Work], damage: str) -> None:
    work = working()
    parent = work.parent()
    folder = work.store.captures / parent.rollout_id
    if damage == "content":
        next(folder.glob("files/*")).write_bytes(b"changed")
    elif damage == "baseline":
        work.store.live_file(parent.rollout_id, "baseline.tar").unlink()
    else:
        [branch] = work.branch(parent.rollout_id, 3)
        (folder / FILE).unlink()
        with pytest.raises(Exception, match=r"Cannot read|no such|cannot be branched"):
            work.branch(branch.rollout_id, 2)
        return
    [branch] = work.branch(parent.rollout_id, 3)
    assert (branch.status, branch.reward) == ("ok", 1.0)
    assert "repeats_because" in branch.metadata


class OtherCommands(ShellChat):
    """Runs other commands than those it is told, if its sandbox was restored: an agent that must not skip."""

    name = "other-commands"

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        if not run.skipped:
            return super().prepare(sandbox, run)

        def loop(tools: LoopTools) -> int:
            tools.ask({"model": run.model, "messages": self._first_messages(run.task.instruction), "max_tokens": 256})
            tools.run("echo other > other", timeout_s=5, max_output=100)
            return 0

        return Launch(loop=loop)


class OtherQuestions(ShellChat):
    """Asks something else, if its sandbox was restored."""

    name = "other-questions"

    def prepare(self, sandbox: Sandbox, run: AgentRun) -> Launch:
        task = run.task.model_copy(update={"instruction": "Something else."})
        changed = AgentRun(**{name: getattr(run, name) for name in run.__slots__} | {"task": task})
        return super().prepare(sandbox, changed if run.skipped else run)


@pytest.mark.parametrize("agent", [OtherCommands, OtherQuestions])
def test_an_agent_that_does_other_work_than_recorded_runs_again_without_the_files(
    working: Callable[..., Work], agent: type[ShellChat]
) -> None:
    work = working()
    parent = work.parent(agent=agent(max_turns=20))
    branches = work.branch(parent.rollout_id, 3, 2, agent=agent(max_turns=20), concurrency=2)
    for branch in branches:
        assert (branch.status, branch.reward) == ("ok", 1.0), branch.reason
        assert "other" not in work.tree(branch)
        assert "restored_call" not in branch.metadata
        assert "instead of" in branch.metadata["repeats_because"] or "differs" in branch.metadata["repeats_because"]
        assert branch.metadata["replayed"] >= 1
    assert len(work.model.played()) <= 6 + 2 * 5  # a repeated draw diverges, so later answers are sampled


@pytest.mark.slow
def test_two_branch_commands_at_once_do_not_disturb_each_other(working: Callable[..., Work]) -> None:
    work = working()
    parent = work.parent()
    results: list[list[Outcome]] = []
    threads = [
        threading.Thread(target=lambda: results.append(work.branch(parent.rollout_id, 4, 3, concurrency=3)))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [len(each) for each in results] == [3, 3]
    draws = {work.tree(outcome)["draw.txt"] for each in results for outcome in each}
    assert draws == {work.tree(parent)["draw.txt"]}


def test_a_killed_branch_resumes_from_the_files_again(
    working: Callable[..., Work], monkeypatch: pytest.MonkeyPatch
) -> None:
    work = working()
    parent = work.parent()
    child = os.fork()
    if child == 0:  # dies when it records the files before its second own call
        write = Recorder.fact

        def dying(self: Recorder, kind: str, fields: dict[str, Any], payload: bytes = b"") -> bool:
            if kind == "files" and fields["call"] == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return write(self, kind, fields, payload)

        try:
            monkeypatch.setattr(Recorder, "fact", dying)
            with RolloutStore(work.store.root) as store:
                StoredRollout(store, parent.rollout_id).branch(call=3, samples=1, **work.options)
        finally:
            os._exit(1)
    assert os.WIFSIGNALED(os.waitpid(child, 0)[1])
    [interrupted] = work.store.interrupted()
    [outcome] = resume_rollouts(work.store, **work.options)
    assert (outcome.rollout_id, outcome.reward) == (interrupted, 1.0)
    assert (outcome.metadata["restored_call"], outcome.metadata["replayed"]) == (4, 4)
    assert work.tree(outcome)["draw.txt"] == work.tree(parent)["draw.txt"]
    assert len(work.model.played()) == 6 + 3


@pytest.mark.slow
def test_truncated_and_failed_rollouts_can_be_branched(working: Callable[..., Work]) -> None:
    work = working()
    truncated = work.parent(agent=ShellChat(max_turns=3), task=TASK)
    [branch] = work.branch(truncated.rollout_id, 3)
    assert (branch.reward, branch.metadata["restored_call"]) == (1.0, 3)
    assert len(branch.turns) == 6
    failing = TASK.model_copy(update={"verify": ("false",)})
    failed = work.parent(failing)
    assert failed.reward == 0.0
    [again] = work.branch(failed.rollout_id, 2)
    assert (again.reward, again.metadata["restored_call"]) == (0.0, 3)


@pytest.mark.slow
def test_thousands_of_files_are_recorded_once(working: Callable[..., Work]) -> None:
    make = "mkdir many; cd many; for n in $(seq 3000); do echo $n > $n; done"
    work = working((make, "sleep 0.1; echo 1 > one", "echo 2 > two"))
    parent = work.parent(Task(instruction="Work.", verify=("test -e many/3000",)))
    files = RecordedFiles.before(work.store.captures, parent.rollout_id, 4)
    assert (files.call, len(files.changed)) == (4, 3003)
    entries = read_entries(work.store.captures / parent.rollout_id)
    assert len([payload for head, payload in entries if head["k"] == "files"][-1]) < 1000
    [branch] = work.branch(parent.rollout_id, 3)
    assert (branch.metadata["restored_call"], work.tree(branch)) == (4, work.tree(parent))


def test_links_that_lead_out_of_the_sandbox_are_not_followed(local: Sandboxes, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir(mode=0o755)
    (secret / "key").write_text("key")
    with local.open() as sandbox:
        sandbox.exec(f"ln -s {secret} folder; ln -s {secret}/key file; ln -s / root")
        root = sandbox.open_root()
        try:
            seen = recorded_files._look(root, ["home/user"])
            assert sorted(seen) == [f"home/user/workdir{name}" for name in ("", "/file", "/folder", "/root")]
            with pytest.raises(NotRestorable, match="cannot be read"):
                recorded_files._look(root, ["home/user/workdir/folder"])
        finally:
            os.close(root)
