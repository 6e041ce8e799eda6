"""The suite fails when a guard is taken out: each guard is disabled in this process, and a cheat that it stops pays.

The sandboxes, the proxy and the rollouts are real; only the guard's own function is replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from openenv.rollout import verifier, worktree
from openenv.rollout.capture import model_call
from openenv.rollout.engine import Engine
from openenv.rollout.phases import ModelAccess, PhaseFailed, RolloutRun
from openenv.rollout.proof import Evidence, Proof
from openenv.sandboxes.base import Sandboxes
from openenv.sandboxes.local import bubblewrap
from openenv.testing import all_cheats, run_cheats

Disable = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Mutation:
    """A guard, how to take it out, and a cheat that only this guard stops."""

    guard: str
    disable: Disable
    cheat: str
    kind: str = "win"


def no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Proof, "judge", lambda self, marks: Evidence(seen=True))


def no_look_at_the_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier, "_changed", lambda *args: None)


def links_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worktree.WorktreeGuard, "reveals", lambda *args: False)


def settings_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worktree.WorktreeGuard, "covers", lambda *args, **options: False)
    monkeypatch.setattr(worktree.Patterns, "cover", lambda *args, **options: False)


def the_endpoint_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    def believe(self: ModelAccess, cancel: object) -> bool:
        self._outage = "the agent's call failed"
        return False

    monkeypatch.setattr(ModelAccess, "ask_endpoint", believe)


def the_truncated_are_not_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(Engine.__init__.__kwdefaults__, "verify_truncated", False)


def no_control_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def blame(self: RolloutRun, phase: object, exc: Exception) -> None:
        raise PhaseFailed("sandbox_failed", str(exc))

    monkeypatch.setattr(RolloutRun, "_control_run", blame)


def every_parameter_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    allow = model_call.allow
    every = frozenset({"grammar"})
    monkeypatch.setattr(
        model_call, "allow", lambda name, body, *, engine, may_set: allow(name, body, engine=engine, may_set=every)
    )
    monkeypatch.setattr(model_call, "steering", lambda *args: [])


def the_network_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    namespaces = bubblewrap.namespaces
    monkeypatch.setattr(
        bubblewrap, "namespaces", lambda user: [option for option in namespaces(user) if option != "--unshare-net"]
    )


MUTATIONS = (
    Mutation("the proof of a line's end", no_proof, "ended-check/exit"),
    Mutation("the look at the verifier's scripts", no_look_at_the_scripts, "edited-as-it-runs/next-script"),
    Mutation("links to the verifier's files are dropped", links_are_kept, "linked-answer/relative"),
    Mutation("settings are the setup's", settings_are_kept, "pytest-settings/pytest.ini-collect-only"),
    Mutation("the endpoint is asked", the_endpoint_is_not_asked, "endpoint-blamed/status-500", "dodge"),
    Mutation("the truncated are verified", the_truncated_are_not_verified, "exit-of-the-agent/hangs", "dodge"),
    Mutation("the control run", no_control_run, "work-folder/removed", "dodge"),
    Mutation("the allow-list of parameters", every_parameter_passes, "changed-sampling/grammar"),
    Mutation("the network namespace", the_network_is_shared, "host-network"),
)


@pytest.mark.slow
@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.cheat)
def test_a_cheat_pays_when_its_guard_is_taken_out(
    mutation: Mutation, local: Sandboxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    cheats = [cheat for cheat in all_cheats() if cheat.name == mutation.cheat]
    held = run_cheats(local, cheats=cheats, quick=True)
    assert [result.kind for result in held.results] == [None]
    mutation.disable(monkeypatch)
    paid = run_cheats(local, cheats=cheats, quick=True)
    assert [result.kind for result in paid.results] == [mutation.kind], paid.results
