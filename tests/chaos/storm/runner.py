"""Many episodes at once, each through its own faults and beside its twin, and what is left when all is over."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from .episode import Ask, Trace, play, script_of
from .faults import Plan, plan_of
from .players import AWAITING, LATE, player_of
from .proxy import FaultProxy
from .remains import Remains
from .server import GRACE_S, PING_S, Server, running, wait_until
from .verdict import VIOLATIONS, Outcome, Verdict, judge

OUTAGE_S = GRACE_S * 1.5
TWIN = -2
SLOTS = 4
QUIET_S = 6 * GRACE_S + 4 * PING_S + 15
VECTORS = ("vector", "first-k")
NONE = "none came true"
_NEXT_SEEDS = 100_000  # from the seed of one connection's faults to that of another's


@dataclass(frozen=True)
class Storm:
    """What is to be run.

    Args:
        package: What is put through it: a name in `report.NAMES`.
        episodes: How many; with `ours` the first half awaits, the second blocks; a `VectorEnv` has several each.
        first_seed: The seed of the first.
        at_once: How many at the same time.
        quiet_s: How long to wait until the servers have ended what clients left behind.
    """

    package: str = "ours"
    episodes: int = 1000
    first_seed: int = 0
    at_once: int = 12
    quiet_s: float = QUIET_S

    @property
    def judged(self) -> int:
        """How many verdicts there will be: each session of a `VectorEnv` gets its own."""
        return self.episodes * (SLOTS if self.package in VECTORS else 1)

    @property
    def seeds(self) -> range:
        """The seeds of its episodes."""
        return range(self.first_seed, self.first_seed + self.episodes)


@dataclass
class Result:
    """What came of it."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    table: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    violations: list[str] = field(default_factory=list)
    sessions_left: int = 0
    environments_left: int = 0
    threads_left: list[str] = field(default_factory=list)
    others_left: list[str] = field(default_factory=list)
    seconds: float = 0.0
    _counted: set[int] = field(default_factory=set)

    @property
    def is_clean(self) -> bool:
        """Whether nothing lied and nothing was left behind."""
        left = self.sessions_left or self.environments_left or self.threads_left or self.others_left
        return not (self.violations or left)

    def add(self, use: str, plan: Plan, verdict: Verdict, mishaps: Sequence[str] = ()) -> None:
        """Count an episode."""
        self.count(verdict)
        if plan.seed not in self._counted:  # sessions may share connections, and their faults
            self._counted.add(plan.seed)
            self.faults.update(fault.kind.value for fault in plan.injected)
            self.faults.update(mishaps)
        for name in {*(fault.kind.value for fault in plan.injected), *mishaps} or {NONE}:
            self.table[name][verdict.outcome.value] += 1
        if verdict.outcome in VIOLATIONS:
            where = ", ".join([*(f"{f.kind.name} {f.direction} {f.point}" for f in plan.injected), *mishaps])
            self.violations.append(f"seed {plan.seed} ({use}): {verdict.outcome.value}: {verdict.detail} [{where}]")

    def count(self, verdict: Verdict) -> None:
        """Count how something ended."""
        self.outcomes[verdict.outcome.value] += 1
        if verdict.outcome in (Outcome.TYPED_ERROR, Outcome.OTHER_ERROR):
            self.errors[verdict.detail] += 1


class Run:
    """One storm under way.

    Args:
        storm: What is run.
        on_progress: Called with each verdict.
    """

    def __init__(self, storm: Storm, on_progress: Callable[[Result], None]) -> None:
        self._storm = storm
        self._on_progress = on_progress
        self._result = Result()
        self._lock = threading.Lock()

    def run(self) -> Result:
        """Run it to its end."""
        began, remains = time.monotonic(), Remains()
        with contextlib.ExitStack() as stack:
            if self._storm.package == "queue":
                from .crowds import Crowds  # the published package has no such thing

                Crowds(self._storm, self._result, self._told).run(stack)
            else:
                self._play_all(stack)
        self._result.threads_left, self._result.others_left = remains.found()
        self._result.seconds = time.monotonic() - began
        return self._result

    def _play_all(self, stack: contextlib.ExitStack) -> None:
        storm = self._storm
        self._servers, self._quiet = _serve(storm.package, stack)
        self._proxy = stack.enter_context(FaultProxy())
        with ThreadPoolExecutor(storm.at_once) as pool:
            if storm.package in VECTORS:
                list(pool.map(self._vector, storm.seeds))
            elif storm.package in AWAITING:
                asyncio.run(self._await_all(storm.seeds, storm.package))
            elif storm.package in ("ours", "published"):
                half = storm.episodes // 2
                asyncio.run(self._await_all(storm.seeds[:half], "async"))
                list(pool.map(lambda seed: self._block(seed, "sync"), storm.seeds[half:]))
            else:
                list(pool.map(lambda seed: self._block(seed, storm.package), storm.seeds))
        servers = {id(server): server for server in (*self._servers, *self._quiet)}.values()
        wait_until(lambda: all(server.is_empty for server in servers), storm.quiet_s)
        self._result.sessions_left = sum(server.sessions() for server in servers)
        self._result.environments_left = sum(server.alive() for server in servers)

    async def _await_all(self, seeds: range, use: str) -> None:
        turns = asyncio.Semaphore(self._storm.at_once)

        async def one(seed: int) -> None:
            async with turns:
                await self._episode(seed, use)

        await asyncio.gather(*(one(seed) for seed in seeds))

    def _block(self, seed: int, use: str) -> None:
        asyncio.run(self._episode(seed, use))

    def _vector(self, seed: int) -> None:
        from .fleet import owners_of, play_vector, steps_of  # the published package has no such thing

        first_k = self._storm.package == "first-k"
        script = steps_of(script_of(seed))
        # Twins have servers of their own, so that the books of the others list one client each.
        twins = play_vector([self._quiet[0].url], seed, script, first_k=first_k)
        servers = self._servers if first_k else [self._servers[seed % 2]]
        plans = [plan_of(seed + number * _NEXT_SEEDS) for number in range(len(servers))]
        with contextlib.ExitStack() as stack:
            ways = [self._proxy.route(s.port, p, outage_s=OUTAGE_S) for s, p in zip(servers, plans, strict=True)]
            urls = [stack.enter_context(way).url for way in ways]
            traces = play_vector(urls, seed, script, first_k=first_k)
        plan = Plan(seed, {}, [fault for plan in plans for fault in plan.injected])
        for owner, trace, twin in zip(owners_of(seed), traces, twins, strict=True):
            deeds = {
                f"{server.port}.{serial}": done for server in servers for serial, done in server.deeds(owner).items()
            }
            verdict = judge(owner, script, trace, _sound(twin, seed), deeds)
            self._settle(f"{self._storm.package} {owner}", plan, verdict)

    async def _episode(self, seed: int, use: str) -> None:
        server, quiet = self._servers[seed % len(self._servers)], self._quiet[seed % len(self._quiet)]
        script, plan = script_of(seed), plan_of(seed, late=use in LATE)
        twin = await _play(player_of(use, quiet.url, seed), seed, script, owner=TWIN)
        for reply in twin.replies:
            reply["owner"] = seed
        _sound(twin, seed)
        server.mishaps.begin(seed)
        with self._proxy.route(server.port, plan, outage_s=OUTAGE_S) as route:
            player = server.mishaps.player(player_of(use, route.url, seed), seed, seed)
            trace = await _play(player, seed, script, owner=seed)
        mishaps = server.mishaps.end(seed)
        self._settle(f"{use} {seed}", plan, judge(seed, script, trace, twin, server.deeds(seed)), mishaps)

    def _settle(self, use: str, plan: Plan, verdict: Verdict, mishaps: Sequence[str] = ()) -> None:
        with self._lock:
            self._result.add(use, plan, verdict, mishaps)
            self._told()

    def _told(self) -> None:
        self._on_progress(self._result)


def _serve(package: str, stack: contextlib.ExitStack) -> tuple[list[Server], list[Server]]:
    """Start the servers that are stormed, and those where twins play."""
    if package == "workers":
        from .workers import running_in_processes  # the published package has no such things

        served = [stack.enter_context(running_in_processes(coroutine=flag)) for flag in (False, True)]
        return served, [stack.enter_context(running("ours", coroutine=False))]
    if package == "server-workers":
        from .server_workers import running_with_workers

        return [stack.enter_context(running_with_workers())], [stack.enter_context(running("ours", coroutine=False))]
    if package == "gateway":
        from .gateways import running_behind_gateways

        return [stack.enter_context(running_behind_gateways())], [stack.enter_context(running("ours", coroutine=False))]
    if package == "restarts":
        from .restarts import restarting

        return [stack.enter_context(restarting())], [stack.enter_context(running("ours", coroutine=False))]
    served = [stack.enter_context(running(package, coroutine=flag)) for flag in (False, True)]
    return served, [stack.enter_context(running(package, coroutine=False))] if package in VECTORS else served


def _sound(twin: Trace, seed: int) -> Trace:
    if twin.error is not None:
        raise RuntimeError(f"seed {seed}: the twin failed without a fault") from twin.error
    return twin


async def _play(player: Any, seed: int, script: list[Ask], *, owner: int) -> Trace:
    try:
        unsent_is_harmless = getattr(player, "UNSENT_IS_HARMLESS", False)
        return await play(player, seed, script, owner=owner, unsent_is_harmless=unsent_is_harmless)
    finally:
        with contextlib.suppress(Exception):
            closing = player.close()
            if closing is not None:
                await closing
