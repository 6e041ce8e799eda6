"""JSON schemas as pydantic writes them: violations of a value (by `jsonschema`), and small values that satisfy one.

`python -m openenv.packaging.validate.json_schema` evaluates untrusted schemas in a separate process, because a pattern
can take forever to match and only a process can be ended. It reads `[[value, schema], ...]` as JSON from standard input
and writes a list of violations for each pair.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from openenv.protocol.schema import Unmakeable, make_example

Schema = Mapping[str, Any]


def violations(value: Any, schema: Schema) -> list[str]:
    """Return each violation as `place: reason`; an empty list if the value satisfies the schema.

    A schema that cannot be evaluated (an unknown type, a reference that leads nowhere or in a circle, a pattern in
    another dialect of regular expressions) is not the value's fault, so it violates nothing.
    """
    import jsonschema
    import referencing

    # The empty registry stops a schema of another server from making this process fetch references.
    # Pydantic writes this version of JSON schema.
    validator = jsonschema.Draft202012Validator(schema, registry=referencing.Registry())
    problems: list[str] = []
    try:
        for error in validator.iter_errors(value):
            problems += _sentences(error)
    except (jsonschema.exceptions.UnknownType, referencing.exceptions.Unresolvable, re.error, RecursionError):
        pass
    return problems


def _sentences(error: Any) -> Iterator[str]:
    """Describe one `jsonschema.ValidationError` in a line, or in one per unknown field."""
    inner = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in error.absolute_path)
    place = inner.removeprefix(".") or "value"
    rule, limit, value = error.validator, error.validator_value, error.instance
    # One line for each unknown field instead of one for all.
    if rule == "additionalProperties" and limit is False:
        for name in value.keys() - error.schema.get("properties", {}).keys():
            yield f"{inner}.{name}".removeprefix(".") + ": there is no such field"
        return
    # A union of one alternative is pydantic's optional field; its inner error is clearer.
    if rule in ("anyOf", "oneOf"):
        if len(limit) == 1:
            for only in error.context:
                yield from _sentences(only)
            return
        reason = f"{shown(value)} fits no alternative"
    elif rule == "type":
        reason = f"{shown(value)} is not of type {limit if isinstance(limit, str) else ' or '.join(limit)}"
    elif rule == "required":
        reason = f"{next((name for name in limit if error.message.startswith(repr(name))), limit)} is missing"
    elif rule in ("const", "enum"):
        reason = f"{shown(value)} is {'not' if rule == 'const' else 'none of'} {shown(limit)}"
    elif rule in ("minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        reason = f"{value} is too {'small' if 'inimum' in rule else 'large'}"
    elif rule in ("minLength", "maxLength", "minItems", "maxItems"):
        reason = f"its length {len(value)} is out of bounds"
    elif rule == "pattern":
        reason = f"{shown(value)} does not match {limit}"
    else:
        reason = str(error.message)
    yield f"{place}: {reason}"


def shown(value: Any) -> str:
    """Return a value as text, not too long for a line."""
    # Values come from the server and may be long.
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def make(schema: Schema, variant: int = 0) -> Any:
    """Generate a small value that satisfies a schema: required fields only, smallest values; higher variants vary them.

    Raises:
        Unmakeable: The schema asks for something that cannot be generated, such as a pattern.
    """

    def text(part: Schema) -> str:
        # Higher variants are longer texts, so that actions differ.
        least: int = part.get("minLength", 0)
        return ("abcdefgh" * (1 + least))[: min(least + variant, part.get("maxLength", least + variant))]

    value = make_example(schema, text, variant=variant)
    # Generated values are checked too: a schema may have rules that the generator ignores.
    if problems := violations(value, schema):
        raise Unmakeable(problems[0])
    return value


# The parent process is trusted, but the schemas inside are not.
MAX_INPUT_BYTES = 32 << 20
_MODULE = "openenv.packaging.validate.json_schema"


def main() -> None:
    """Read values and schemas, and write the violations of each value."""
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
    # A crash of the evaluator is a problem of the schema, not of the value.
    if done.returncode != 0:
        raise ValueError(f"the schemas cannot be evaluated: {done.stderr.decode('utf-8', 'replace').strip()[-200:]}")
    problems: list[list[str]] = json.loads(done.stdout)
    return problems


if __name__ == "__main__":
    main()
