"""The performance targets and their verdicts: what must be reached, against what, and whether it was."""

from __future__ import annotations

from dataclasses import dataclass

from samples import Samples

PUBLISHED_SUBJECTS = ("published-default", "published-uvloop", "published")
HIGHER_IS_BETTER = {"steps_per_s", "setup_per_s"}
SERVERS = ("ours-thread", "ours-inline")
BUSY = ("64", "256", "1000")
IMAGES = ("84x84x4 uint8",)
VECTORS = ("ours-thread json", "ours-thread first")

# what a measured figure is set against
PUBLISHED_BEST, NOTHING, OWN_64 = "published", "nothing", "own figure at 64"
OWN_SOCKETS, OWN_JSON = "sockets", "json"  # the same server's figure under another name
CLIENTS = "clients"  # likewise, and the name of the figures that each package's own clients reach on their servers
PUBLISHED_CLIENTS = "published clients"


@dataclass(frozen=True, slots=True)
class Target:
    """A bound on a figure, or on its ratio to the reference."""

    what: str
    section: str
    metric: str
    subjects: tuple[str, ...]
    cases: tuple[str, ...]
    bound: float
    text: str
    reference: str = PUBLISHED_BEST


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether one subject met a target in one case."""

    target: Target
    subject: str
    case: str
    measured: str
    verdict: str


TARGETS = (
    Target("steps/s", "ws", "steps_per_s", ("ours-thread",), BUSY, 5.0, ">= 5x"),
    Target("steps/s", "ws", "steps_per_s", ("ours-inline",), BUSY, 10.0, ">= 10x"),
    Target("p99", "ws", "p99_ms", ("ours-thread",), BUSY, 1 / 3, "<= 1/3"),
    Target("steps/s", "ws", "steps_per_s", ("ours-thread",), ("1",), 2.0, ">= 2x"),
    Target("steps/s", "ws", "steps_per_s", ("ours-inline",), ("1",), 2.8, ">= 2.8x"),
    Target("connect + reset/s", "ws", "setup_per_s", SERVERS, ("256", "1000"), 5.0, ">= 5x"),
    Target("errors", "ws", "errors", SERVERS, ("4000",), 0.0, "none", NOTHING),
    Target("threads", "ws", "server_threads", SERVERS, ("4000",), 64.0, "<= 64", NOTHING),
    Target("RSS", "ws", "server_rss_mb", SERVERS, ("4000",), 1 / 2, "<= 1/2"),
    Target("CPU per step, growth", "ws", "server_cpu_us_per_step", SERVERS, ("4000",), 2.0, "<= 2x of 64", OWN_64),
    Target("HTTP step, stateful", "http", "steps_per_s", ("ours-thread",), ("64",), 3.0, ">= 3x"),
    Target("MCP tool call", "mcp", "steps_per_s", ("ours-thread",), ("step on /ws", "POST /mcp"), 20.0, ">= 20x"),
    Target(
        "MCP tool call",
        "mcp",
        "steps_per_s",
        ("ours-thread", "ours-uvicorn"),
        ("POST /mcp, no session",),
        15.0,
        ">= 15x",
    ),
    Target(
        "HTTP step, no session",
        "http",
        "steps_per_s",
        ("ours-thread stateless", "ours-uvicorn stateless"),
        ("64",),
        4.0,
        ">= 4x",
    ),
    Target(
        "vector step",
        "vector",
        "steps_per_s",
        VECTORS,
        ("256 sessions",),
        10.0,
        ">= 10x",
    ),
    Target(
        "vector step",
        "vector",
        "steps_per_s",
        VECTORS,
        ("256 sessions",),
        2.5,
        ">= 2.5x of sockets",
        OWN_SOCKETS,
    ),
    Target(
        "vector step, client to client",
        "vector",
        "steps_per_s",
        VECTORS,
        ("256 sessions",),
        10.0,
        ">= 10x of published clients",
        PUBLISHED_CLIENTS,
    ),
    Target(
        "vector step, client to client",
        "vector",
        "steps_per_s",
        VECTORS,
        ("256 sessions",),
        2.5,
        ">= 2.5x of own clients",
        CLIENTS,
    ),
    Target("image step", "vector", "steps_per_s", ("ours-thread",), IMAGES, 5.0, ">= 5x of JSON", OWN_JSON),
    Target("image bytes", "vector", "bytes_per_step", ("ours-thread",), IMAGES, 1 / 3, "<= 1/3 of JSON", OWN_JSON),
    Target("client import CPU", "import", "cpu_s", ("ours",), ("client",), 1 / 10, "<= 1/10"),
    Target("client import modules", "import", "modules", ("ours",), ("client",), 350.0, "<= 350", NOTHING),
    Target("start to healthy, wall", "start", "wall_s", ("ours-thread",), ("healthy",), 1 / 8, "<= 1/8"),
    Target("async round trip", "clients", "median_us", ("ours",), ("async stub", "async own"), 2 / 3, "<= 2/3"),
    Target("sync round trip", "clients", "median_us", ("ours",), ("sync stub", "sync own"), 1 / 2, "<= 1/2"),
)


def published_best(samples: Samples, section: str, *, case: str, metric: str, variant: str = "") -> float | None:
    """Return the figure of the better published configuration, or that of a variant of it."""
    subjects = (f"{subject} {variant}".strip() for subject in PUBLISHED_SUBJECTS)
    medians = (samples.median(section, subject, case=case, metric=metric) for subject in subjects)
    found = [median for median in medians if median is not None]
    if not found:
        return None
    return max(found) if metric in HIGHER_IS_BETTER else min(found)


def ratio(samples: Samples, section: str, subject: str, *, case: str, metric: str) -> float | None:
    """Return a subject's figure divided by that of the better published configuration."""
    own = samples.median(section, subject, case=case, metric=metric)
    best = published_best(samples, section, case=case, metric=metric)
    return own / best if own is not None and best else None


def show_ratio(value: float | None) -> str:
    """Format a ratio so that two digits tell."""
    if value is None:
        return "-"
    return f"{value:.1f}x" if value >= 10 else f"{value:.2f}x" if value >= 0.1 else f"{value:.3f}x"


def judge(samples: Samples, target: Target, *, subject: str, case: str) -> Judgement:
    """Compare one subject with a target in one case."""
    where = {"case": case, "metric": target.metric}
    if target.reference == PUBLISHED_BEST:
        value = ratio(samples, target.section, subject, **where)
    elif target.reference == PUBLISHED_CLIENTS:
        own = samples.median(target.section, subject, **where)
        base = published_best(samples, target.section, **where, variant=CLIENTS)
        value = own / base if own is not None and base else None
    elif target.reference in (OWN_SOCKETS, OWN_JSON, CLIENTS):
        own = samples.median(target.section, subject, **where)
        base = samples.median(target.section, f"{subject.split()[0]} {target.reference}", **where)
        value = own / base if own is not None and base else None
    elif target.reference == OWN_64:
        own = samples.median(target.section, subject, **where)
        base = samples.median(target.section, subject, case="64", metric=target.metric)
        value = own / base if own is not None and base else None
    else:
        value = samples.worst(target.section, subject, **where)
    if value is None:
        failure = samples.failure(target.section, subject, case)
        return Judgement(target, subject, case, "-", "MISS" if failure and "not available" not in failure else "n/a")
    # an error is a quick reply: figures that contain errors prove nothing
    clean = not samples.worst(target.section, subject, case=case, metric="errors")
    met = value >= target.bound if target.metric in HIGHER_IS_BETTER else value <= target.bound
    shown = f"{value:,.0f}" if target.reference == NOTHING else show_ratio(value)
    return Judgement(target, subject, case, shown, "PASS" if met and clean else "MISS")


def judgements(samples: Samples) -> list[Judgement]:
    """Judge every target in every case that was measured."""
    return [
        judge(samples, target, subject=subject, case=case)
        for target in TARGETS
        for subject in target.subjects
        for case in target.cases
        if case in samples.cases(target.section)
    ]
