"""Harbor task folders for tests, and an image for them that needs no registry."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

BASE_IMAGE = "harbor-base:1"
"""The image that `write_task` builds from; `import_base` makes it."""


def write_task(
    folder: Path,
    *,
    toml: str = "",
    instruction: str = "Write the sum of the numbers in numbers.txt into sum.txt.",
    dockerfile: str = f"FROM {BASE_IMAGE}\nRUN chmod 1777 /tmp\nWORKDIR /app\nCOPY numbers.txt /app/numbers.txt\n",
) -> Path:
    """Write a task: sum the numbers of a file that is in the image; the test needs a binary file of its own."""
    files: dict[str, str | bytes] = {
        "task.toml": toml
        or 'version = "1.0"\n[metadata]\ndifficulty = "easy"\n[verifier]\ntimeout_sec = 60.0\n[agent]\n'
        "timeout_sec = 90.0\n[environment]\nbuild_timeout_sec = 120.0\ncpus = 1\nmemory_mb = 1024\nstorage_mb = 512\n",
        "instruction.md": instruction,
        "environment/Dockerfile": dockerfile,
        "environment/numbers.txt": "20\n22\n",
        "tests/test.sh": "#!/bin/sh\n"
        "mkdir -p /logs/verifier\n"
        "head -c 2 /tests/secret.bin | od -An -tx1 | grep -q 'ff 00' || exit 3\n"
        "if [ -f numbers.txt ] && grep -qx 42 /app/sum.txt; then echo 1; else echo 0; fi > /logs/verifier/reward.txt\n",
        "tests/secret.bin": b"\xff\x00\xfe",
        "solution/solve.sh": "#!/bin/sh\nset -e\n. /solution/lib.sh\nsum numbers.txt > sum.txt\n",
        "solution/lib.sh": 'sum() { t=0; while read -r n; do t=$((t + n)); done < "$1"; echo $t; }\n',
    }
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def import_base(host: str, busybox: Path, *, programs: tuple[Path, ...] = ()) -> None:
    """Give an engine the base image: busybox, and the libraries that some programs of this machine need."""
    docker = ["docker", "--host", host]
    subprocess.run([*docker, "import", str(busybox), BASE_IMAGE], check=True, capture_output=True)
    libraries = {line for program in programs for line in _libraries(program)}
    if not libraries:
        return
    container = subprocess.run([*docker, "create", BASE_IMAGE, "/bin/sh"], check=True, capture_output=True, text=True)
    name = container.stdout.strip()
    pack = ["tar", "-c", "-h", "-P", *sorted(libraries)]
    archive = subprocess.run(pack, check=True, capture_output=True).stdout
    subprocess.run([*docker, "cp", "-", f"{name}:/"], input=archive, check=True, capture_output=True)
    subprocess.run([*docker, "commit", name, BASE_IMAGE], check=True, capture_output=True)
    subprocess.run([*docker, "rm", name], check=True, capture_output=True)


def _libraries(program: Path) -> list[str]:
    listing = subprocess.run(["ldd", str(program)], capture_output=True, text=True, check=False).stdout
    return re.findall(r"(/\S+)", listing)
