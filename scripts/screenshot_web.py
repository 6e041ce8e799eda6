"""Take the pictures of the web page: `docs/assets/web.png`, `web_dark.png` and `episode.png`.

Serves the Gridworld as a user would, plays an episode in a real browser, and takes a picture in light and in dark, and
one of the recorded episode.
Needs Chromium (or `OPENENV_TEST_BROWSER`), Playwright and Pillow.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from playwright.sync_api import Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "docs" / "assets"
PICTURES = {"light": ASSETS / "web.png", "dark": ASSETS / "web_dark.png"}
EPISODE = ASSETS / "episode.png"
SIZE = {"width": 1280, "height": 1120}
SEED = 2
MOVES = ["right", "right", "right", "down", "down", "left", "right", *["down"] * 4, "left", "left"]
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]


def main() -> None:
    """Serve, play, take the pictures."""
    program = os.environ.get("OPENENV_TEST_BROWSER") or shutil.which("chromium") or shutil.which("google-chrome")
    command = [sys.executable, "-m", "openenv", "serve", str(ROOT / "envs" / "gridworld_env"), "--port", "0"]
    episodes = tempfile.TemporaryDirectory(prefix="openenv-pictures-")
    command += ["--record-dir", episodes.name]
    server = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        url = address_of(server)
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=program, args=FLAGS)
            for scheme, target in PICTURES.items():
                context = browser.new_context(viewport=SIZE, color_scheme=scheme, device_scale_factor=1.5)
                page = context.new_page()
                page.goto(f"{url}/web/")
                play(page)
                page.screenshot(path=target)
                shrink(target)
                if scheme == "light":
                    replay(page)
                    page.screenshot(path=EPISODE)
                    shrink(EPISODE)
                context.close()
            browser.close()
    finally:
        server.terminate()
        server.wait(20)
        episodes.cleanup()


def address_of(server: subprocess.Popen[str]) -> str:
    """Read the address that a server announces."""
    assert server.stderr is not None
    for line in server.stderr:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found.group()
    raise SystemExit("the server did not start")


def play(page: Page) -> None:
    """Begin an episode with a seed, and make some moves."""
    page.get_by_role("button", name="Seed and options").click()
    page.get_by_label("Seed", exact=True).fill(str(SEED))
    page.get_by_role("button", name="Reset with these").click()
    page.get_by_role("button", name="Seed and options").click()
    for count, move in enumerate(MOVES, start=1):
        page.locator(".move", has_text=move).click()
        expect(page.locator(".badges")).to_contain_text(f"step {count}")
    expect(page.locator(".frame iframe")).to_have_count(1)
    page.mouse.move(0, 0)
    page.evaluate("document.activeElement.blur()")
    page.wait_for_timeout(500)


def replay(page: Page) -> None:
    """Look at the episode again, in its midst."""
    page.get_by_role("tab", name="Episodes").click()
    page.locator("tr[data-episode] a").first.click()
    slider = page.get_by_role("slider")
    for _ in range(5):
        slider.press("ArrowLeft")
    expect(page.locator(".frame iframe:visible")).to_have_count(1)
    page.wait_for_timeout(500)


def shrink(picture: Path) -> None:
    """Store a picture in as few bytes as it can be."""
    Image.open(picture).convert("RGB").quantize(256, dither=Image.Dither.NONE).save(picture, optimize=True)
    print(f"{picture.relative_to(ROOT)}: {picture.stat().st_size // 1024} KB")


if __name__ == "__main__":
    main()
