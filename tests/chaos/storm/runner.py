"""Many episodes at once, each through its own faults and beside its twin, and what is left when all is over."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from .episode import Ask, Trace, client_of, play, script_of
from .faults import Plan, plan_of
from .proxy import FaultProxy
from .server import GRACE_S, PING_S, Server, running, wait_until
from .verdict import VIOLATIONS, Outcome, Verdict, judge

OUTAGE_S = GRACE_S * 1.5
TWIN = -2
SLOTS = 4
QUIET_S = 6 * GRACE_S + 4 * PING_S + 15


@dataclass(frozen=True)
class Storm:
    """What is to be run.

    Args:
        package: `ours` or `published`; `vector` is ours with a `VectorEnv`, `http` ours over HTTP with keys, `tools`
            ours with steps that are tool calls.
        episodes: How many; the first half awaits, the second blocks, but for a `VectorEnv`, which has several each.
        first_seed: The seed of the first.
        at_once: How many at the same time.
    """

    package: str = "ours"
    episodes: int = 1000
    first_seed: int = 0
    at_once: int = 12

    @property
    def judged(self) -> int:
        """How many verdicts there will be: each session of a `VectorEnv` gets its own."""
        return self.episodes * (SLOTS if self.package == "vector" else 1)


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
    seconds: float = 0.0
    _counted: set[int] = field(default_factory=set)

    @property
    def is_clean(self) -> bool:
        """Whether nothing lied and nothing was left behind."""
        return not (self.violations or self.sessions_left or self.environments_left or self.threads_left)

    def add(self, use: str, plan: Plan, verdict: Verdict) -> None:
        """Count an episode."""
        self.outcomes[verdict.outcome.value] += 1
        if verdict.outcome in (Outcome.TYPED_ERROR, Outcome.OTHER_ERROR):
            self.errors[verdict.detail] += 1
        if plan.seed not in self._counted:  # sessions may share connections, and their faults
            self._counted.add(plan.seed)
            self.faults.update(fault.kind.value for fault in plan.injected)
        for kind in {fault.kind for fault in plan.injected}:
            self.table[kind.value][verdict.outcome.value] += 1
        if not plan.injected:
            self.table["none came true"][verdict.outcome.value] += 1
        if verdict.outcome in VIOLATIONS:
            where = ", ".join(f"{f.kind.name} {f.direction} {f.point}" for f in plan.injected)
            self.violations.append(f"seed {plan.seed} ({use}): {verdict.outcome.value}: {verdict.detail} [{where}]")


class Run:
    """One storm under way."""

    def __init__(self, storm: Storm, on_progress: Callable[[Result], None]) -> None:
        self._storm = storm
        self._on_progress = on_progress
        self._result = Result()
        self._lock = threading.Lock()

    def run(self) -> Result:
        """Run it to its end."""
        began, threads = time.monotonic(), set(threading.enumerate())
        storm = self._storm
        seeds = range(storm.first_seed, storm.first_seed + storm.episodes)
        half = len(seeds) // 2
        with contextlib.ExitStack() as stack:
            self._servers = [stack.enter_context(running(storm.package, coroutine=flag)) for flag in (False, True)]
            self._proxy = stack.enter_context(FaultProxy())
            with ThreadPoolExecutor(storm.at_once) as pool:
                if storm.package == "vector":
                    list(pool.map(self._vector, seeds))
                elif storm.package == "http":
                    list(pool.map(lambda seed: self._block(seed, "http"), seeds))
                elif storm.package == "tools":
                    asyncio.run(self._await_all(seeds, "tools"))
                else:
                    asyncio.run(self._await_all(seeds[:half]))
                    list(pool.map(self._block, seeds[half:]))
            wait_until(lambda: not any(s.sessions() or s.book.alive for s in self._servers), QUIET_S)
            self._result.sessions_left = sum(server.sessions() for server in self._servers)
            self._result.environments_left = sum(server.book.alive for server in self._servers)
        wait_until(lambda: set(threading.enumerate()) <= threads, 30)
        self._result.threads_left = sorted(thread.name for thread in set(threading.enumerate()) - threads)
        self._result.seconds = time.monotonic() - began
        return self._result

    async def _await_all(self, seeds: range, use: str = "async") -> None:
        turns = asyncio.Semaphore(self._storm.at_once)

        async def one(seed: int) -> None:
            async with turns:
                await self._episode(seed, use)

        await asyncio.gather(*(one(seed) for seed in seeds))

    def _block(self, seed: int, use: str = "sync") -> None:
        asyncio.run(self._episode(seed, use))

    def _vector(self, seed: int) -> None:
        from .fleet import owners_of, play_vector, steps_of  # the published package has no such thing

        server, other = self._servers[seed % 2], self._servers[1 - seed % 2]
        script, plan = steps_of(script_of(seed)), plan_of(seed)
        twins = play_vector(other.url, seed, script)  # so that each server's book tells of one of them
        with self._proxy.route(server.port, plan, outage_s=OUTAGE_S) as route:
            traces = play_vector(route.url, seed, script)
        for owner, trace, twin in zip(owners_of(seed), traces, twins, strict=True):
            self._settle(owner, "vector", plan, judge(owner, script, trace, _sound(twin, seed), _deeds(server, owner)))

    async def _episode(self, seed: int, use: str) -> None:
        server, script, plan = self._servers[seed % 2], script_of(seed), plan_of(seed)
        twin = await _play(server.url, use, seed, script, owner=TWIN)
        for reply in twin.replies:
            reply["owner"] = seed
        _sound(twin, seed)
        with self._proxy.route(server.port, plan, outage_s=OUTAGE_S) as route:
            trace = await _play(route.url, use, seed, script, owner=seed)
        self._settle(seed, use, plan, judge(seed, script, trace, twin, _deeds(server, seed)))

    def _settle(self, owner: int, use: str, plan: Plan, verdict: Verdict) -> None:
        with self._lock:
            self._result.add(f"{use} {owner}", plan, verdict)
            self._on_progress(self._result)


def _sound(twin: Trace, seed: int) -> Trace:
    if twin.error is not None:
        raise RuntimeError(f"seed {seed}: the twin failed without a fault") from twin.error
    return twin


def _player(url: str, use: str) -> Any:
    if use == "http":
        from .web import web_client  # the published package has no such things

        return web_client(url)
    if use == "tools":
        from .tools import tool_client

        return tool_client(url)
    client = client_of(url)
    return client.sync() if use == "sync" else client


async def _play(url: str, use: str, seed: int, script: list[Ask], *, owner: int) -> Trace:
    player = _player(url, use)
    try:
        return await play(player, seed, script, owner=owner, unsent_is_harmless=use == "http")
    finally:
        with contextlib.suppress(Exception):
            closing = player.close()
            if closing is not None:
                await closing


def _deeds(server: Server, seed: int) -> Any:
    return {serial: list(done) for serial, done in list(server.book.deeds.get(seed, {}).items())}
