"""Take the pictures of the rollout viewer: `docs/assets/view.png`, `view_dark.png` and `view_list.png`.

Runs the demo's rollout, a real OpenCode with a scripted model, and small tasks with the agents `oracle` and `noop`;
shows them with `openenv view` in a real browser. Needs what `make demo` needs, Chromium (or `OPENENV_TEST_BROWSER`),
Playwright and Pillow.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import demo_rollout
from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

from openenv.rollout import Model, RolloutStore, Sampling, run_many, run_rollout
from openenv.rollout.tasks.task_sets import task_set
from openenv.testing import ScriptedModel
from openenv.testing.scripted.agent_scripts import binary_search

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
PICTURES = {"light": ASSETS / "view.png", "dark": ASSETS / "view_dark.png"}
LIST = ASSETS / "view_list.png"
SIZE = {"width": 1280, "height": 1240}
LIST_SIZE = {"width": 1280, "height": 900}
SETS = ("sudoku", "sql", "repair")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def main() -> None:
    """Run, serve, take the pictures."""
    program = os.environ.get("OPENENV_TEST_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    with tempfile.TemporaryDirectory() as folder:
        rollout_id = fill(Path(folder) / "rollouts")
        command = [sys.executable, "-m", "openenv", "view", str(Path(folder) / "rollouts"), "--port", "0"]
        server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        try:
            url = address_of(server)
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
                for scheme, target in PICTURES.items():
                    context = browser.new_context(viewport=SIZE, color_scheme=scheme, device_scale_factor=1.5)
                    page = context.new_page()
                    page.goto(f"{url}#rollouts/{rollout_id}")
                    unfold(page)
                    page.screenshot(path=target)
                    context.close()
                    shrink(target)
                page = browser.new_page(viewport=LIST_SIZE, color_scheme="light", device_scale_factor=1.5)
                page.goto(url)
                expect(page.locator(".virtual-row .reward").first).to_be_visible()
                page.wait_for_timeout(500)
                page.screenshot(path=LIST)
                shrink(LIST)
                browser.close()
        finally:
            server.terminate()
            server.wait(20)


def fill(folder: Path) -> str:
    """Run small tasks, then the demo's rollout; return the ID of the last one."""
    with RolloutStore(folder) as store:
        tasks = [task for name in SETS for task in task_set(name).tasks(4)]
        for agent in ("noop", "oracle"):
            run_many(tasks, agent=agent, store=store, concurrency=2)
        with ScriptedModel(binary_search()) as scripted:
            model = Model(**scripted.model(), sampling=Sampling())
            return run_rollout(demo_rollout.TASK, agent="opencode", model=model, store=store).rollout_id


def address_of(server: subprocess.Popen[str]) -> str:
    """Read the address that the viewer prints."""
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"http://127\.0\.0\.1:\d+/web/", line):
            return found.group()
    raise SystemExit("the viewer did not start")


def unfold(page: Page) -> None:
    """Show the first turn with a tool call, and its tokens."""
    turn = page.locator(".turn", has=page.locator(".tool-use")).first
    turn.get_by_text("Tokens, coloured").click()
    expect(turn.locator(".tokens .token").first).to_be_visible()
    turn.locator(".tool-use").first.scroll_into_view_if_needed()
    page.evaluate("document.activeElement.blur()")
    page.evaluate("scrollTo(0, document.querySelector('.rollouts .tabs').getBoundingClientRect().top + scrollY - 16)")
    page.wait_for_timeout(500)


def shrink(picture: Path) -> None:
    """Store a picture in as few bytes as it can be."""
    Image.open(picture).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
