"""Which checks there are, from which level on they run, and what a failure of each means.

Knows ids and verdicts; must not know how a check is done.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Severity = Literal["fail", "warn"]
Verdict = Literal["pass", "warn", "fail"]
Status = Literal["pass", "fail", "skip", "error"]
LEVELS = {"static": 1, "runtime": 2, "semantic": 3}
BOUNDS = {
    "max_oracle_tolerance": 0.1,
    "min_floor_margin": 0.1,
    "max_variance_tolerance": 0.2,
    "max_episode_timeout_s": 3600.0,
}


@dataclass(frozen=True, slots=True)
class Rule:
    """A check: what holds when it passes, and what it means when it does not."""

    id: str
    says: str
    severity: Severity = "fail"

    @property
    def level(self) -> int:
        """From which level on it runs."""
        return LEVELS[self.id.partition(".")[0]]


RULES = (
    Rule("static.manifest", "openenv.yaml says what the environment promises"),
    Rule("static.layout", "the files are there that serving, building and sharing need", "warn"),
    Rule("static.entry_point", "`server` is a command, and server/app.py can be run", "warn"),
    Rule("runtime.startup", "it can be served"),
    Rule("runtime.reward_well_formed", "rewards are finite numbers within the range"),
    Rule("runtime.rubric_introspectable", "the rubric can be looked into", "warn"),
    Rule("runtime.observation_schema", "observations fit their schema"),
    Rule("runtime.state_contract", "the state names the episode and counts its steps"),
    Rule("runtime.trajectory_record", "an episode can be written down", "warn"),
    Rule("runtime.reward_attribution", "rewards say what they are for", "warn"),
    Rule("runtime.tool_declaration_accuracy", "the tools are those that are declared"),
    Rule("runtime.task_declaration_accuracy", "the tasks are as many as are declared"),
    Rule("runtime.seed_control", "a seed gives the same beginning again"),
    Rule("runtime.episode_determinism", "a seed and actions give the same episode again"),
    Rule("runtime.network_policy", "only declared hosts are reached"),
    Rule("runtime.host_containment", "the host cannot be touched"),
    Rule("runtime.resource_bounds", "an episode stays within its memory and time"),
    Rule("runtime.episode_isolation", "sessions at the same time do not meet"),
    Rule("runtime.oracle_containment", "the oracle is out of an agent's reach"),
    Rule("runtime.step_before_reset", "a step before the first reset does no harm", "warn"),
    Rule("runtime.invalid_action", "an action that does not fit is refused, and the episode goes on", "warn"),
    Rule("runtime.session_cleanup", "a session leaves nothing behind when it ends"),
    Rule("semantic.oracle_max", "the oracle earns the best reward"),
    Rule("semantic.floor_gap", "doing the least stays well below the best reward"),
    Rule("semantic.canary_floor", "canaries earn nothing"),
    Rule("semantic.no_solution_leakage", "observations do not tell the solution"),
    Rule("semantic.verifier_determinism", "the same episode is paid the same"),
    Rule("semantic.verifier_portability", "another process pays the same"),
    Rule("semantic.resource_envelope", "many episodes stay within memory and time"),
    Rule("semantic.replayability", "another process replays the same episode"),
)
RULE = {rule.id: rule for rule in RULES}
WITHOUT_A_SERVER_OF_OURS = frozenset(  # what a running server can be asked for, by anyone who may reset and step
    {
        "runtime.reward_well_formed",
        "runtime.observation_schema",
        "runtime.state_contract",
        "runtime.seed_control",
        "runtime.episode_determinism",
        "runtime.episode_isolation",
        "runtime.step_before_reset",
        "runtime.invalid_action",
        "runtime.session_cleanup",
    }
)


def verdict(results: Iterable[tuple[str, Status]]) -> Verdict:
    """Say what follows from results: what was skipped is not known to be good, and so a warning."""
    worst: Verdict = "pass"
    for check_id, status in results:
        if status == "pass":
            continue
        if status != "skip" and RULE[check_id].severity == "fail":
            return "fail"
        worst = "warn"
    return worst
