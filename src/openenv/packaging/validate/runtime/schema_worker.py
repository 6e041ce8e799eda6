"""`python -m openenv.packaging.validate.runtime.schema_worker` evaluates untrusted schemas in its own process.

A pattern in a schema can take forever to match; a process can be ended. In: `[[value, schema], …]` as JSON on standard
input; out: the violations of each, a list of lists of texts.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from ..json_schema import violations

MAX_INPUT_BYTES = 32 << 20
_MODULE = "openenv.packaging.validate.runtime.schema_worker"


def main() -> None:
    """Read values and schemas, and write what is wrong with the values."""
    text = sys.stdin.buffer.read(MAX_INPUT_BYTES + 1)
    if len(text) > MAX_INPUT_BYTES:
        raise SystemExit(f"more than {MAX_INPUT_BYTES} bytes of values and schemas")
    sys.stdout.write(json.dumps([violations(value, schema) for value, schema in json.loads(text)]))


def violations_elsewhere(pairs: Sequence[tuple[Any, dict[str, Any]]], *, timeout_s: float) -> list[list[str]]:
    """Return the violations of each value against its schema, found by another process.

    Raises:
        TimeoutError: It took too long, and was ended.
        ValueError: It could not evaluate them.
    """
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE],
            input=json.dumps(pairs).encode(),
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"the schemas could not be evaluated within {timeout_s:g} s") from error
    if done.returncode != 0:
        raise ValueError(f"the schemas cannot be evaluated: {done.stderr.decode('utf-8', 'replace').strip()[-200:]}")
    problems: list[list[str]] = json.loads(done.stdout)
    return problems


if __name__ == "__main__":
    main()
