"""The page's files: what the page loads is there, and what is there is loaded."""

from __future__ import annotations

import re

import pytest

from openenv.server.web.web_page import FOLDER

PAGES = {name: (FOLDER / name).read_text(encoding="utf-8") for name in ("index.html", "viewer.html")}
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.js"))
IMPORT = re.compile(r'from "\./([\w.]+)"')


def named(page: str) -> list[str]:
    """Return the files that a page names."""
    return re.findall(r'(?:href|src)="static/([\w.]+)"', PAGES[page])


def test_the_pages_name_every_file_and_no_other() -> None:
    assert {*named("index.html"), *named("viewer.html")} == {path.name for path in FOLDER.iterdir()} - PAGES.keys()


@pytest.mark.parametrize("page", PAGES)
def test_a_page_loads_what_its_modules_import_and_nothing_twice(page: str) -> None:
    scripts = [name for name in named(page) if name.endswith(".js")]
    assert len(scripts) == len(set(scripts))
    imported = {name for script in scripts for name in IMPORT.findall((FOLDER / script).read_text(encoding="utf-8"))}
    first = {"index.html": "main.js", "viewer.html": "viewer.js"}[page]
    assert imported == set(scripts) - {first, "boot.js"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_module_imports_what_is_there_and_says_what_it_is(script: str) -> None:
    text = (FOLDER / script).read_text(encoding="utf-8")
    assert set(IMPORT.findall(text)) <= set(SCRIPTS)
    assert text.startswith("/**\n * ")
    assert len(text.splitlines()) <= 300


@pytest.mark.parametrize("script", SCRIPTS)
def test_nothing_of_an_environment_becomes_markup_or_code(script: str) -> None:
    text = (FOLDER / script).read_text(encoding="utf-8")
    unsafe = re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text)
    assert unsafe == (["innerHTML"] if script == "about.js" else [])  # the README, which the server renders


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_code_or_address_of_its_own(page: str) -> None:
    assert re.findall(r"\son\w+=|javascript:|<style|https?://", PAGES[page]) == []
