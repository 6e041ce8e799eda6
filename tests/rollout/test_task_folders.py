"""`load_tasks`: task files, Harbor's task folders, and what is said of folders that cannot run."""

from __future__ import annotations

from pathlib import Path

import pytest

from harbor_folders import write_task
from openenv.errors import RolloutError, SandboxUnsupported
from openenv.rollout import Task, load_tasks, run_many, run_rollout
from openenv.rollout.agents.builtin import Shell
from openenv.rollout.tasks.task_folders import load_harbor_task
from openenv.rollout.verify.attempts import read_reward
from openenv.sandboxes import Limits
from openenv.sandboxes.base import Sandboxes, SandboxSpec


def test_a_harbor_folder_is_a_task(tmp_path: Path) -> None:
    (task,) = load_tasks(write_task(tmp_path / "sum it"))
    assert task.instruction.startswith("Write the sum")
    assert task.task_id == "sum it"
    assert task.workdir == "/app"
    assert task.build == str(tmp_path / "sum it" / "environment")
    assert task.image is not None
    assert task.image.startswith("openenv-task:")
    assert task.limits == Limits(memory_mb=1024, cpus=1, disk_mb=512)
    assert (task.agent_timeout_s, task.verify_timeout_s, task.build_timeout_s) == (90, 60, 120)
    assert task.verify == ("sh /tests/test.sh",)
    assert task.verify_files["/tests/secret.bin"] == b"\xff\x00\xfe"
    assert task.solution == ("sh /solution/solve.sh",)
    assert "/solution/lib.sh" in task.solution_files
    assert task.files == {}
    assert task.metadata["difficulty"] == "easy"


def test_a_changed_dockerfile_is_another_image(tmp_path: Path) -> None:
    folder = write_task(tmp_path / "t")
    before = load_harbor_task(folder).image
    assert load_harbor_task(folder).image == before
    (folder / "environment" / "numbers.txt").write_text("1\n")
    assert load_harbor_task(folder).image != before


def test_tasks_are_found_in_folders_of_folders(tmp_path: Path) -> None:
    write_task(tmp_path / "tasks" / "maths" / "b")
    write_task(tmp_path / "tasks" / "maths" / "a")
    (tmp_path / "tasks" / ".hidden").mkdir()
    (tmp_path / "tasks" / "loop").symlink_to(tmp_path / "tasks")
    assert [task.task_id for task in load_tasks(f"harbor:{tmp_path}")] == ["a", "b"]


def test_task_files_are_found_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("instruction: do b\n")
    (tmp_path / "a.json").write_text('{"instruction": "do a", "files": {"x": {"base64": "/wA="}}}')
    tasks = load_tasks(tmp_path)
    assert [task.task_id for task in tasks] == ["a", "b"]
    assert tasks[0].files == {"x": b"\xff\x00"}
    assert load_tasks(tmp_path / "b.yaml") == tasks[1:]


@pytest.mark.parametrize(
    ("toml", "words"),
    [
        ("[[steps]]\nname = 'a'\n", "several steps"),
        ("[environment]\nos = 'windows'\n", "Windows"),
        ("[environment]\ngpus = 1\n", "GPUs"),
        ("[environment]\nmemory = 'lots'\n", "is not a size"),
        ("[verifier]\ntimeout_sec = 'soon'\n", "verifier.timeout_sec"),
        ("[verifier\n", "cannot be read"),
        ("[verifier]\nenv = {KEY = '${OPENAI_API_KEY}'}\n", "host variable OPENAI_API_KEY"),
        ("[environment]\ncpus = -1\n", "greater than 0"),
        ("[environment]\nworkdir = '/etc'\n", "belongs to the system"),
    ],
)
def test_what_cannot_run_says_why(tmp_path: Path, toml: str, words: str) -> None:
    with pytest.raises(RolloutError, match=words):
        load_tasks(write_task(tmp_path, toml=toml))


def test_settings_of_older_and_newer_files_are_read(tmp_path: Path) -> None:
    toml = (
        "[task]\nname = 'org/sum'\n[environment]\nmemory = '2G'\nstorage = '512M'\ndocker_image = 'there:1'\n"
        "workdir = '/testbed'\nenv = {A = '1', B = '${X:-two}'}\n[verifier]\nenvironment_mode = 'separate'\n"
        "env = {A = '3'}\n[verifier.environment]\ndocker_image = 'grader:1'\n"
    )
    task = load_harbor_task(write_task(tmp_path, toml=toml))
    assert (task.task_id, task.image, task.build, task.workdir) == ("org/sum", "there:1", None, "/testbed")
    assert (task.limits.memory_mb, task.limits.disk_mb) == (2048, 512)
    assert (task.verify_image, task.verify_build) == ("grader:1", None)
    assert task.verify_env == {"A": "3", "B": "two"}
    assert task.solution_env == {"A": "1", "B": "two"}


def test_a_folder_without_tasks_says_so(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="no tasks in"):
        load_tasks(tmp_path)
    with pytest.raises(RolloutError, match="no such file, folder or task set"):
        load_tasks(tmp_path / "nowhere")
    folder = write_task(tmp_path / "t")
    (folder / "tests" / "test.sh").unlink()
    with pytest.raises(RolloutError, match=r"tests/test\.sh"):
        load_tasks(folder)
    (tmp_path / "secret").write_text("x")
    (write_task(tmp_path / "u") / "tests" / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(RolloutError, match="leads out"):
        load_tasks(tmp_path / "u")


def test_a_task_with_an_image_is_refused_by_local_before_anything_starts(local: Sandboxes, tmp_path: Path) -> None:
    (task,) = load_tasks(write_task(tmp_path))
    for refused in (task, Task(instruction="x", image="debian"), Task(instruction="x", workdir="/app")):
        with pytest.raises(SandboxUnsupported, match="local starts no images"):
            run_rollout(refused, agent="noop", sandbox=local)
    fine = Task(instruction="x")
    outcomes: list[int] = []
    with pytest.raises(SandboxUnsupported, match="local opens no network"):
        run_many(
            [fine, Task(instruction="x", network="setup")],
            agent="noop",
            sandbox=local,
            on_outcome=lambda number, outcome: outcomes.append(number),
        )
    assert outcomes == []


def test_bytes_survive_json_and_reach_the_sandbox(local: Sandboxes) -> None:
    content = bytes(range(256))
    task = Task(
        instruction="x",
        files={"data.bin": content},
        verify_files={"expected.bin": content},
        verify=("cmp data.bin expected.bin",),
    )
    again = Task.model_validate_json(task.model_dump_json())
    assert again == task
    outcome = run_rollout(again, agent="noop", sandbox=local)
    assert (outcome.status, outcome.reward) == ("ok", 1.0), outcome.verify_results


def test_the_agents_code_writes_no_reward_before_the_verifiers(local: Sandboxes) -> None:
    cheat = "import os; open(os.path.expanduser('~/logs/verifier/reward.json'), 'w').write('1')"
    task = Task(
        instruction="Write module.py.",
        verify_files={"check.sh": "python3 -c 'import module'; echo 0 > ~/logs/verifier/reward.txt\n"},
        verify=("sh check.sh",),
    )
    outcome = run_rollout(task, agent=Shell([f'echo "{cheat}" > module.py']), sandbox=local)
    assert (outcome.status, outcome.reward) == ("ok", 0.0), outcome.verify_results
    judged = task.model_copy(update={"verify_files": {"check.sh": "echo 0.5 > ~/logs/verifier/reward.json\n"}})
    written = run_rollout(judged.model_copy(update={"reward_file": True}), agent="noop", sandbox=local)
    assert (written.status, written.reward) == ("ok", 0.5), written.reason


@pytest.mark.parametrize(
    ("content", "reward", "others"),
    [
        ("[" * 60_000, None, {}),
        ('{"reward": ' * 9_000, None, {}),
        ('{"reward": 1%s}' % ("0" * 400), None, {}),
        ("1" * 5_000, None, {}),
        ('{"reward": 1e400, "style": 1}', None, {"style": 1.0}),
        ('{"reward": 1, "style": NaN, "speed": 1e400}', 1.0, {"reward": 1.0}),
        ('{"reward": NaN}', None, {}),
        ('{"reward": true}', None, {}),
        ('{"reward": {"reward": 1}}', None, {}),
        ("[1]", None, {}),
    ],
    ids=["deep", "deep-object", "huge", "long", "infinite", "nan-beside", "nan", "bool", "nested", "list"],
)
def test_a_reward_file_is_read_whatever_it_contains(
    local: Sandboxes, content: str, reward: float | None, others: dict[str, float]
) -> None:
    task = Task(instruction="x", verify=("cat ~/logs/verifier/reward.json",))
    with local.open(SandboxSpec()) as sandbox:
        sandbox.write_text(f"{sandbox.home}/logs/verifier/reward.json", content)
        written = read_reward(sandbox, task)
    assert written is not None
    assert (written.value, written.rewards) == (reward, others)


def test_a_work_folder_is_outside_of_the_home() -> None:
    with pytest.raises(ValueError, match="outside of /home/user"):
        Task(instruction="x", image="a", workdir="/home/user/project")
    with pytest.raises(ValueError, match="set the image name"):
        Task(instruction="x", build="folder")
