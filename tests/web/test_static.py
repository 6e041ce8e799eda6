"""The page's files: what the page loads is there, and what is there is loaded."""

from __future__ import annotations

import re

import pytest

from openenv.web.web_page import FOLDER

INDEX = (FOLDER / "index.html").read_text(encoding="utf-8")
SCRIPTS = sorted(path.name for path in FOLDER.glob("*.js"))
IMPORT = re.compile(r'from "\./([\w.]+)"')


def test_the_page_names_every_file_and_no_other() -> None:
    named = re.findall(r'(?:href|src)="static/([\w.]+)"', INDEX)
    assert sorted(named) == sorted(path.name for path in FOLDER.iterdir() if path.name != "index.html")


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


def test_the_page_has_no_code_or_address_of_its_own() -> None:
    assert re.findall(r"\son\w+=|javascript:|<style|https?://", INDEX) == []
