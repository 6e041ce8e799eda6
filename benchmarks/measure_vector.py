"""Section on many sessions as one: `VectorEnv` beside a socket for each session, and MessagePack beside JSON lists.

The published package has neither, so its figure is that of a socket for each session. Sockets are driven twice: by the
load generator of the section `ws`, which costs less than any client, to their advantage; and by the asynchronous
clients of each package, all steps gathered, which is what a trainer without `VectorEnv` would run.
"""

from __future__ import annotations

from contextlib import ExitStack

from configurations import BENCHMARKS
from measure_load import sample
from plan import MeasurementError, Plan, run_json
from samples import Sample
from targets import CLIENTS

from servers import Server

SESSIONS, CONNECTIONS = 256, 4
FIRST = 64
IMAGE_SESSIONS = 64
SESSIONS_CASE, IMAGE_CASE = f"{SESSIONS} sessions", "84x84x4 uint8"


def vector_steps(plan: Plan, server: Server, *, sessions: int, codec: str, extra: tuple[str, ...]) -> dict[str, float]:
    """Step sessions with `VectorEnv` in a process of its own and return its figures.

    Raises:
        MeasurementError: the client failed.
    """
    interpreter = plan.interpreters[server.runnable.configuration.side]
    assert interpreter
    if not server.running():
        raise MeasurementError(f"server died: {server.last_line()}")
    command = [interpreter.python, str(BENCHMARKS / "clients" / "vector_steps.py"), "--url", server.url]
    command += ["--pid", str(server.pid), "--sessions", str(sessions), "--connections", str(CONNECTIONS)]
    command += ["--codec", codec, "--seconds", str(plan.seconds), *extra]
    return run_json(command, environment=interpreter.environment, timeout=300, cwd=BENCHMARKS)


def vector_sample(
    plan: Plan,
    server: Server,
    *,
    case: str,
    round_: int,
    sessions: int,
    codec: str,
    extra: tuple[str, ...] = (),
    variant: str = "",
) -> None:
    """Take and record one sample of `VectorEnv`, a failure included."""
    variant = variant or ("" if codec == "msgpack" else codec)
    subject = f"{server.runnable.key} {variant}".strip()
    try:
        values = vector_steps(plan, server, sessions=sessions, codec=codec, extra=extra)
        taken = Sample("vector", subject, case, round_, values)
    except MeasurementError as error:
        taken = Sample("vector", subject, case, round_, failure=str(error))
    plan.record(taken, shown="steps_per_s")


def clients_sample(plan: Plan, server: Server, *, case: str, round_: int, sessions: int) -> None:
    """Take and record one sample of the asynchronous clients of the server's own package, a failure included."""
    configuration = server.runnable.configuration
    interpreter = plan.interpreters[configuration.side]
    assert interpreter
    command = [interpreter.python, str(BENCHMARKS / "clients" / "gathered_steps.py"), "--url", server.url]
    command += ["--pid", str(server.pid), "--sessions", str(sessions), "--seconds", str(plan.seconds)]
    command += ["--protocol", "v1"] if configuration.is_ours else []
    subject = f"{server.runnable.key} {CLIENTS}"
    try:
        if not server.running():
            raise MeasurementError(f"server died: {server.last_line()}")
        values = run_json(command, environment=interpreter.environment, timeout=300, cwd=BENCHMARKS)
        taken = Sample("vector", subject, case, round_, values)
    except MeasurementError as error:
        taken = Sample("vector", subject, case, round_, failure=str(error))
    plan.record(taken, shown="steps_per_s")


def measure_vector(plan: Plan) -> None:
    """Step sessions one socket each and all together; then step sessions with images, in both encodings."""
    for round_ in range(1, plan.rounds + 1):
        with ExitStack() as stack:
            for server in plan.start_servers(stack, section="vector", round_=round_):
                is_ours = server.runnable.configuration.is_ours
                subject = f"{server.runnable.key} sockets" if is_ours else server.runnable.key
                sample(
                    plan, server, section="vector", case=SESSIONS_CASE, round_=round_, sessions=SESSIONS,
                    subject=subject,
                )  # fmt: skip
                clients_sample(plan, server, case=SESSIONS_CASE, round_=round_, sessions=SESSIONS)
                for codec in ("json", "msgpack") if is_ours else ():
                    vector_sample(plan, server, case=SESSIONS_CASE, round_=round_, sessions=SESSIONS, codec=codec)
                if is_ours:
                    vector_sample(
                        plan, server, case=SESSIONS_CASE, round_=round_, sessions=SESSIONS, codec="json",
                        extra=("--first", str(FIRST)), variant="first",
                    )  # fmt: skip
        with ExitStack() as stack:
            for server in plan.start_servers(stack, section="vector", round_=round_, app="pixel_app", only_ours=True):
                for codec in ("json", "msgpack"):
                    vector_sample(
                        plan, server, case=IMAGE_CASE, round_=round_, sessions=IMAGE_SESSIONS, codec=codec,
                        extra=("--pixels",),
                    )  # fmt: skip
