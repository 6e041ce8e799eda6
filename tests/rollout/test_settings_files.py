"""Settings of tools: a check does not find those that no text mentions, and honest solutions keep their files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from openenv.rollout import Task, run_rollout
from openenv.rollout.agents.builtin import Shell
from openenv.rollout.verify.lookups import Settings
from openenv.sandboxes.base import Sandboxes


def settings(*lines: str, asked: str = "", setup: tuple[str, ...] = ()) -> Settings:
    return Settings(lines=lines, asked=[asked], texts=[asked, *lines], places=["", "tests/unit", "app"], setup=setup)


@pytest.mark.parametrize(
    "name",
    [
        *(".proverc", ".valgrindrc", ".Rprofile", "deep/.eslintrc.json", ".cargo/config.toml", "pylintrc", ".venv/x"),
        *("uv.toml", "tests/uv.toml", "tests/unit/tox.cfg", "app/x.ini", "bun.lock", "Justfile", "fabfile.py"),
        *("frobnicate.kdl", "deep/frobnicate-config.ts", "Frobfile", "frobnicaterc.lua", "limits.hcl", "tests/x.opts"),
        *("vite.config.ts", "deep/karma.conf.js", "tsconfig.json", "pnpm-lock.yaml", "phpunit.xml", "deep/deno.json"),
    ],
)
def test_settings_that_no_text_mentions_are_covered(name: str) -> None:
    lines = ("cd app && deno test", "phpunit tests", "frobnicate verify", "./a.out | readlink -")
    assert settings(*lines).cover(name)
    assert not settings(*lines, asked=f"Write /home/user/workdir/{name}.").cover(name)


@pytest.mark.parametrize(
    "name",
    [
        *("answer.json", "config.json", "settings.toml", "app.settings.json", "deep/model.toml", "lib/package.json"),
        *(
            "data.xml",
            "pets.yaml",
            "profile.py",
            "logfile",
            "main.py",
            "notes.md",
            "src/index.ts",
            "node_modules/.pnpm/x",
        ),
        *(".git/config", ".gitignore", ".gitattributes", "__init__.py", "outfile", "readfile.py", "params.ini"),
    ],
)
def test_data_and_code_of_the_agent_are_not_covered(name: str) -> None:
    assert not settings("cd app && python3 main.py", "phpunit tests", "readlink x").cover(name)


def test_a_file_of_the_setup_is_the_agents_only_if_the_task_asks_for_it() -> None:
    check = "sh run.sh .env uv.toml"
    assert not settings(check).cover(".env")
    assert settings(check, setup=(".env",)).cover(".env")
    assert not settings(check, setup=(".env",), asked="Correct .env.").cover(".env")
    for file, line in (("Snakefile", "snakemake"), ("noxfile.py", "nox"), ("build.xml", "ant"), ("a/meson.build", "x")):
        assert settings(line, setup=(file,)).cover(file)
        assert not settings(line, setup=(file,), asked=f"Repair {file}.").cover(file)
    assert not settings("make", setup=("src/builder.py",)).cover("src/builder.py")
    assert not settings(check, setup=("tox.cfg",)).cover("tox.cfg")  # it steers no program of the check


# ---- honest solutions, in real sandboxes ----


@dataclass(frozen=True)
class Honest:
    """A task and a solution that leaves configuration files, which must earn the whole reward."""

    name: str
    instruction: str
    lines: str
    verify: str
    options: Mapping[str, Any] = field(default_factory=dict)


VENV = "for d in .venv/lib/python3*/site-packages; do"
SITE = {"setup": f"python3 -m venv --without-pip .venv; {VENV} echo old = 1 > $d/old.py; done"}
READ = "python3 main.py | grep -qx 42"
HONEST = (
    Honest(
        "json",
        "x",
        'echo \'{"n": 42}\' > config.json; echo \'import json; print(json.load(open("config.json"))["n"])\' > main.py',
        READ,
    ),
    Honest(
        "ini",
        "x",
        "printf '[a]\\nn = 42\\n' > settings.ini; printf 'import configparser as c\\np = c.ConfigParser()\\n"
        'p.read("settings.ini")\\nprint(p["a"]["n"])\\n\' > main.py',
        READ,
    ),
    Honest(
        "deep",
        "x",
        "mkdir pkg; echo 42 > pkg/limits.toml; echo 'print(open(\"pkg/limits.toml\").read().strip())' > main.py",
        READ,
    ),
    Honest("asked-dotfile", "Write .answerrc.", "echo 42 > .answerrc", "cat .answer* | grep -qx 42"),
    Honest("asked-toml", "Write pyproject.toml.", "echo '# 42' > pyproject.toml", "cat py*.toml | grep -q 42"),
    Honest(
        "asked-folder",
        "Write .github/workflows/ci.yml.",
        "mkdir -p .github/workflows; echo 42 > .github/workflows/ci.yml",
        "cat .git*/*/* | grep -qx 42",
    ),
    Honest("check-reads", "x", "echo 42 > limits.toml", "grep -qx 42 limits.toml"),
    Honest("check-reads-dotfile", "x", "mkdir .data; echo 42 > .data/x", "grep -qx 42 .data/x"),
    Honest(
        "solution-writes", "x", "echo 42 > .secretrc", "cat .secret* | grep -qx 42", {"solution": "echo 42 > .secretrc"}
    ),
    Honest("setup-mentions", "x", "echo 42 > .toolrc", "cat .tool* | grep -qx 42", {"setup": "touch seen; : .toolrc"}),
    Honest(
        "project",
        "x",
        "printf 'all:\\n\\t@echo 42\\n' > Makefile",
        "test -e Makefile || exit 1; cat Makefile | grep -q 42",
    ),
    Honest(
        "package", "x", 'echo \'{"name": "x"}\' > package.json; echo 42 > a', "grep -q name pack*.json && grep -qx 42 a"
    ),
    Honest(
        "plain-pyproject",
        "x",
        "echo '[project]' > pyproject.toml; echo 42 > a",
        "cat py*.toml | grep -q project && test -e a",
    ),
    Honest(
        "git",
        "x",
        "git init -q; echo '*.o' > .gitignore; echo 42 > a; touch x.o; git add -A; "
        "git -c user.name=a -c user.email=b commit -qm x",
        'test -z "$(git status --porcelain)" && grep -qx 42 a',
        {"needs": "git"},
    ),
    Honest(
        "pnpm",
        "x",
        "mkdir -p node_modules/.pnpm/a/node_modules/a; cd node_modules; echo 42 > .pnpm/a/node_modules/a/i; "
        "ln -s .pnpm/a/node_modules/a a",
        "grep -qx 42 node_modules/a/i",
    ),
    Honest(
        "new-package",
        "x",
        "mkdir -p node_modules/tiny; echo 42 > node_modules/tiny/index",
        "cat node_modules/t*/i* | grep 42",
    ),
    Honest(
        "module-of-venv",
        "Install tiny.",
        f"{VENV} echo n = 42 > $d/tiny.py; done",
        ".venv/bin/python -c 'import tiny'",
        SITE,
    ),
    Honest("venv-unchanged", "x", "echo 42 > a", ".venv/bin/python -c 'import old' && grep -qx 42 a", SITE),
    Honest("yaml", "x", "for n in 1 2 3; do echo $n > pet$n.yaml; done", "test $(ls | grep -c yaml) = 3"),
    Honest("xml", "x", "mkdir out; echo '<a/>' > out/a.xml; echo '<b/>' > b.xml", "test -e out/a.xml && test -e b.xml"),
    Honest("edited", "x", "echo limit = 42 > app.toml", "grep -q 42 app.toml", {"files": {"app.toml": "limit = 1\n"}}),
)


@pytest.mark.parametrize(
    "honest",
    [pytest.param(one, id=one.name, marks=[] if n % 7 == 0 else [pytest.mark.slow]) for n, one in enumerate(HONEST)],
)
def test_an_honest_solution_with_configuration_files_keeps_its_reward(local: Sandboxes, honest: Honest) -> None:
    options = {name: value for name, value in honest.options.items() if name != "needs"}
    task = Task(instruction=honest.instruction, verify=(honest.verify,), **options)
    outcome = run_rollout(task, agent=Shell([honest.lines]), sandbox=local)
    assert (outcome.status, outcome.reward) == ("ok", 1.0), (outcome.verify_results, outcome.metadata.get("protected"))
