"""What pages weigh and how long they take: ours beside the published package's page and Inspect's viewer.

    python benchmarks/pages.py [--rounds 5] [--into FILE.md]

Four pages in a real browser, in turn, each round with a browser profile that has nothing cached: the page of an echo
environment here and in the published package (Gradio), and the viewers of 1,000 rollouts here and of one log with 1,000
samples in Inspect. `shown` is the time from the request until the page's own content is visible, with nothing else to
do for a tenth of a second; bytes are those on the wire, without the web socket.

Needs Chromium (or `OPENENV_TEST_BROWSER`) and Playwright; makes `.bench/published` and `.bench/inspect` where missing.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from playwright.sync_api import Browser, CDPSession, sync_playwright

from servers import free_port

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from stored_rollouts import fill_store  # noqa: E402

FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
ROLLOUTS = 1000
INSPECT_TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
@task
def sums():
    return Task(dataset=[Sample(input=f"{n} + 1", target=str(n + 1)) for n in range(1000)], scorer=includes())
"""


@dataclass(frozen=True, slots=True)
class Subject:
    """A page, and the text that shows that it is there."""

    name: str
    url: str
    content: str


@dataclass(slots=True)
class Visit:
    """What one visit took."""

    requests: int = 0
    bytes: int = 0
    other_hosts: set[str] = field(default_factory=set)
    shown_ms: float = 0.0
    script_ms: float = 0.0
    heap_mb: float = 0.0


def main() -> None:
    """Start the four servers, visit them in turn, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--into", type=Path, help="a Markdown file to write")
    options = parser.parse_args()
    program = os.environ.get("OPENENV_TEST_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    with contextlib.ExitStack() as stack:
        subjects = start_all(stack)
        playwright = stack.enter_context(sync_playwright())
        browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
        stack.callback(browser.close)
        visits: dict[str, list[Visit]] = {subject.name: [] for subject in subjects}
        for _ in range(options.rounds):
            for subject in subjects:
                visits[subject.name].append(visit(browser, subject))
    text = report(visits, options.rounds)
    print(text)
    if options.into:
        options.into.write_text(text, encoding="utf-8")


def start_all(stack: contextlib.ExitStack) -> list[Subject]:
    """Start the servers; return what to visit."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    app = ROOT / "benchmarks" / "apps"
    published = environment("published", "openenv==0.10.0", "uvloop", "httptools")
    inspect = environment("inspect", "inspect_ai")
    fill_store(folder / "rollouts", ROLLOUTS)
    (folder / "sums.py").write_text(INSPECT_TASK, encoding="utf-8")
    evaluate = [inspect.parent / "inspect", "eval", "sums.py", "--model", "mockllm/model", "--log-dir", "logs"]
    subprocess.run([*evaluate, "--display", "none"], cwd=folder, check=True, capture_output=True)
    ours, theirs, viewer, inspect_view = (free_port() for _ in range(4))
    web = {"ENABLE_WEB_INTERFACE": "true"}
    served = ["-m", "uvicorn", "echo_app:app", "--port"]
    stack.enter_context(running([sys.executable, *served, str(ours)], f"http://127.0.0.1:{ours}/health", app, web))
    stack.enter_context(running([published, *served, str(theirs)], f"http://127.0.0.1:{theirs}/health", app, web))
    view = [sys.executable, "-m", "openenv", "view", str(folder / "rollouts"), "--port", str(viewer)]
    stack.enter_context(running(view, f"http://127.0.0.1:{viewer}/web/", folder, {}))
    logs = [inspect.parent / "inspect", "view", "start", "--log-dir", "logs", "--port", str(inspect_view)]
    stack.enter_context(running(logs, f"http://127.0.0.1:{inspect_view}/", folder, {}))
    return [
        Subject("page of an environment, ours", f"http://127.0.0.1:{ours}/web/", "Reset"),
        Subject("page of an environment, published", f"http://127.0.0.1:{theirs}/web/", "Reset"),
        Subject("viewer, ours", f"http://127.0.0.1:{viewer}/web/", "task-"),
        Subject("viewer, Inspect", f"http://127.0.0.1:{inspect_view}/", "sums"),
    ]


def environment(name: str, *packages: str) -> Path:
    """Return the interpreter of an environment with these packages, and make it where it is missing."""
    python = ROOT / ".bench" / name / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", python.parents[1]], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    return python


@contextlib.contextmanager
def running(command: list[object], url: str, folder: Path, variables: dict[str, str]) -> Iterator[None]:
    """Run a server until the block ends; enter it when the address answers."""
    env = {**os.environ, **variables}
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen([str(part) for part in command], cwd=folder, env=env, stdout=log, stderr=log)
        try:
            end = time.monotonic() + 120
            while not answers(url):
                if process.poll() is not None or time.monotonic() > end:
                    log.seek(0)
                    raise RuntimeError(f"{url} does not answer: {log.read()[-2000:].decode(errors='replace')}")
                time.sleep(0.1)
            yield
        finally:
            process.terminate()
            process.wait(30)


def answers(url: str) -> bool:
    """Return whether an address answers."""
    try:
        with urllib.request.urlopen(url, timeout=2) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def visit(browser: Browser, subject: Subject) -> Visit:
    """Open a page with an empty cache; return what it took until its content was shown and it was quiet."""
    result = Visit()
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    try:
        page = context.new_page()
        session = context.new_cdp_session(page)
        count_traffic(session, result, urlsplit(subject.url).netloc)
        began = time.perf_counter()
        page.goto(subject.url, wait_until="commit")
        page.get_by_text(re.compile(re.escape(subject.content))).first.wait_for(state="visible", timeout=60_000)
        result.shown_ms = (time.perf_counter() - began) * 1000
        page.wait_for_load_state("load")
        page.wait_for_timeout(100)
        metrics = {each["name"]: each["value"] for each in session.send("Performance.getMetrics")["metrics"]}
        result.script_ms = (metrics["ScriptDuration"] + metrics["LayoutDuration"]) * 1000
        result.heap_mb = metrics["JSHeapUsedSize"] / 1e6
        return result
    finally:
        context.close()


def count_traffic(session: CDPSession, result: Visit, host: str) -> None:
    """Count requests and bytes as the browser sees them."""

    def requested(event: dict[str, dict[str, str]]) -> None:
        address = urlsplit(event["request"]["url"])
        if address.scheme.startswith("http"):
            result.requests += 1
            if address.netloc != host:
                result.other_hosts.add(address.netloc)

    def finished(event: dict[str, float]) -> None:
        result.bytes += int(event["encodedDataLength"])

    session.on("Network.requestWillBeSent", requested)
    session.on("Network.loadingFinished", finished)
    session.send("Network.enable")
    session.send("Performance.enable")


def report(visits: dict[str, list[Visit]], rounds: int) -> str:
    """Return the medians as Markdown."""
    lines = [
        "# What pages weigh",
        "",
        f"`python benchmarks/pages.py --rounds {rounds}`, {os.cpu_count()} cores: medians of {rounds} visits with an "
        "empty cache, in turn. The viewers show 1,000 rollouts, and a log of 1,000 samples.",
        "",
        "| | requests | KB | other hosts | shown after ms | scripts and layout ms | heap MB |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name, each in visits.items():
        hosts = set().union(*(one.other_hosts for one in each))
        cells = [
            f"{statistics.median(one.requests for one in each):.0f}",
            f"{statistics.median(one.bytes for one in each) / 1000:,.0f}",
            str(len(hosts)),
            f"{statistics.median(one.shown_ms for one in each):,.0f}",
            f"{statistics.median(one.script_ms for one in each):,.0f}",
            f"{statistics.median(one.heap_mb for one in each):.1f}",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
