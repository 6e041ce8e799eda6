"""Dockerfiles as clouds need them: the command they end in, what they copy, and simpler forms of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from openenv.providers.dockerfiles import DockerfileSource, flatten, server_command, strip_mounts


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("FROM a\n", None),
        ("FROM a\nCMD uvicorn app:app --port 8000\n", "uvicorn app:app --port 8000"),
        ('FROM a\nCMD ["sh", "-c", "cd /x && run it"]\n', "sh -c 'cd /x && run it'"),
        ("FROM a\ncmd first\n# CMD not this\nCMD second \\\n  --more\n", "second    --more"),
        ("FROM a AS b\nCMD build\nFROM c\n", None),
        ("FROM a AS b\nCMD serve\nFROM b\nRUN x\n", "serve"),
        ('FROM a\nENTRYPOINT ["tini", "--"]\nCMD ["serve", "a b"]\n', "tini -- serve 'a b'"),
        ("FROM a\nCMD old\nENTRYPOINT serve\n", "serve"),
        ('FROM a\nWORKDIR /app/my env\nCMD ["serve"]\n', "cd '/app/my env' && serve"),
        ("FROM a\nCMD [not json\n", "[not json"),
    ],
)
def test_the_command_of_a_dockerfile(text: str, command: str | None) -> None:
    assert server_command(text) == command


@pytest.mark.parametrize(
    ("text", "stripped"),
    [
        ("RUN --mount=type=cache,target=/x uv sync", "RUN uv sync"),
        ("RUN --mount=type=cache \\\n    --mount=type=bind \\\n    uv sync", "RUN \\\n    uv sync"),
        ("  run --mount=a \\\n# why\n --mount=b \\\n  x", "  run \\\n  x"),
        ("RUN echo --mount=kept", "RUN echo --mount=kept"),
        ("COPY --from=x a b", "COPY --from=x a b"),
    ],
)
def test_mounts_are_stripped_and_nothing_else(text: str, stripped: str) -> None:
    assert strip_mounts(text) == stripped


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder as `openenv init` makes it."""
    copies = "COPY . /app\nCOPY --chown=1 server/*.py pyproject.toml /x/\n"
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "Dockerfile").write_text(f"FROM a\n{copies}")
    (tmp_path / "server" / "app.py").touch()
    (tmp_path / "pyproject.toml").touch()
    return tmp_path


def test_the_context_is_the_parent_of_the_dockerfiles_folder_unless_it_is_given(project: Path) -> None:
    source = DockerfileSource.of(project / "server" / "Dockerfile")
    assert source.context == project
    assert str(source) == str(project / "server" / "Dockerfile")
    assert DockerfileSource.parse(str(source)) == source
    other = DockerfileSource.of(project / "server" / "Dockerfile", project.parent / project.name)
    assert DockerfileSource.parse(str(other)) == source


def test_another_context_is_part_of_the_reference(project: Path) -> None:
    (project / "Dockerfile").write_text("FROM a\nCOPY server/app.py /app/\nADD https://x/y /z\nCOPY $WHAT /q\n")
    source = DockerfileSource.of(project / "Dockerfile", project)
    assert DockerfileSource.parse(str(source)) == source
    assert source.context == project


def test_what_is_copied_must_be_there(project: Path) -> None:
    with pytest.raises(ValueError, match=r"COPY source 'server/\*.py'.*context_dir="):
        DockerfileSource.of(project / "server" / "Dockerfile", project / "server")
    with pytest.raises(FileNotFoundError, match="Dockerfile not found"):
        DockerfileSource.of(project / "nothing")
    with pytest.raises(ValueError, match="context_dir does not exist"):
        DockerfileSource.of(project / "server" / "Dockerfile", project / "nowhere")


def test_two_stages_of_one_image_become_one() -> None:
    text = """ARG BASE=python:3.12
FROM --platform=linux/amd64 ${BASE} AS builder
WORKDIR /app
RUN --mount=type=cache,target=/c uv sync
FROM $BASE
COPY --from=builder /app /app
COPY --from=builder /out/wheel /opt/wheels/
COPY --from=0 /etc/x /etc/y
CMD ["serve"]
"""
    lines = flatten(text).splitlines()
    assert lines[:3] == ["FROM python:3.12", "WORKDIR /app", "RUN uv sync"]
    assert lines[3].startswith("RUN mkdir -p /opt/wheels/ && ")
    assert "cp -a /etc/x /etc/y" in lines[4]
    assert lines[5] == 'CMD ["serve"]'


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("FROM a AS x\nFROM b\nCOPY --from=x / /\n", "different images"),
        ("FROM a\nCOPY --from=ghcr.io/astral-sh/uv /uv /bin/\n", "does not name a stage"),
        ("FROM a\nRUN --mount=type=secret,id=k x\n", "mounts secret"),
        ("FROM a\nRUN <<EOF\nx\nEOF\n", "here-documents"),
        ("RUN x\n", "no FROM"),
    ],
)
def test_what_cannot_be_one_stage_is_refused_with_advice(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"{problem}.*openenv build"):
        flatten(text)
