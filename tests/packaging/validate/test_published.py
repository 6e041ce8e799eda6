"""The same programs with the published package and with ours: policies, manifests, reports, hashes and graders."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from environments import Heard, Parrot, Say
from openenv import State, create_app
from openenv.cli.init import Names, write_package
from openenv.testing import serve
from program_interpreters import Interpreter

# It prints what does not depend on how a package words its texts.
PROGRAM = """
import json, sys
from pathlib import Path
from openenv.validation import *
from openenv.validation.graders.runtime import (
    NetworkPolicyGrader, ObservationSchemaGrader, RewardWellFormedGrader, StateContractGrader,
)
from openenv.validation.runtime.collector import collect_runtime_evidence
from openenv.validation.runtime.contracts import RuntimePlan, RuntimeReset
from openenv.validation.runner import default_grader_registry, source_digest

folder, url = Path(sys.argv[1]), sys.argv[2]
policies = {}
for version in ("v1", "v2"):
    policy = load_policy(version)
    rows = sorted((e.check_id, int(e.level), e.lane.value, e.severity.value) for e in policy.entries)
    policies[version] = [rows, policy.bounds.model_dump()]
report = run_validation(folder, max_level=Level.STATIC)
shape = json.loads(write_report(report))
result = next(one for one in shape["results"] if one["check_id"] == "static.manifest")
reset = RuntimeReset(episode_id="a", seed=1)
plan = RuntimePlan(plan_schema_version="1", reset=reset, actions=[{"message": "hello"}, {"message": "x"}])
evidence = collect_runtime_evidence(url, plan, episode_timeout_s=60)
graded = []
for grader in (RewardWellFormedGrader(), ObservationSchemaGrader(), StateContractGrader()):
    subject = Subject(folder, report.manifest, None, None, folder, runtime_evidence=evidence)
    graded.append([grader.check_id, int(grader.level), grader.depends_on, grader.run(subject).status.value])
print(json.dumps({
    "policies": policies,
    "digest": source_digest(folder),
    "report": sorted(shape),
    "manifest": shape["manifest"],
    "versions": [shape["report_schema_version"], shape["policy_version"], shape["lane"], shape["levels_run"]],
    "result": [sorted(result), result["status"], result["measured"]],
    "operations": [[one.operation, json.loads(one.request_json)] for one in evidence.exchanges],
    "failure": evidence.failure_reason,
    "graded": graded,
}))
"""


class PaidParrot(Parrot):
    """Names its episode and pays each step, which the published graders ask for."""

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
        self.episode_id = episode_id
        return super().reset(seed, episode_id, **kwargs)

    def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        return super().step(action).model_copy(update={"reward": 0.5})

    @property
    def state(self) -> Any:
        return State(episode_id=self.episode_id, step_count=self.count)


@pytest.mark.slow
@pytest.mark.published
def test_both_packages_say_the_same(tmp_path: Path, ours: Interpreter, published: Interpreter) -> None:
    write_package(Names.of("maze_env"), tmp_path / "maze_env")
    (tmp_path / "empty").mkdir()
    said = {}
    with serve(create_app(PaidParrot, Say, Heard)) as served:
        for interpreter in (ours, published):
            done = subprocess.run(
                [interpreter.python, "-B", "-c", PROGRAM, "maze_env", served.url],
                cwd=tmp_path,
                env=interpreter.environment(tmp_path / "empty"),
                capture_output=True,
                text=True,
                timeout=240,
                check=False,
            )
            assert done.returncode == 0, done.stderr
            said[interpreter.name] = json.loads(done.stdout)
    assert said["ours"]["failure"] is None
    assert [one[-1] for one in said["ours"]["graded"]] == ["pass"] * 3
    assert said["ours"] == said["published"]
