"""The program inside the sandbox of a `PyExecutor`: runs pieces of code in one namespace. Standard library only.

python3 python_worker.py PIPE OPTIONS     requests are lines of JSON in the named pipe, replies lines on stdout
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any

MAX_OUTPUT = 1024 * 1024
"""How much of each stream a reply has, in bytes."""
_MODULE = "__openenv_code__"


def main(pipe: str, options: dict[str, Any]) -> None:
    """Answer requests until the pipe is removed."""
    limit_resources(options.get("memory_mb"), options.get("max_file_mb"))
    sys.path.extend(path for path in options["paths"] if path not in sys.path)
    # A descriptor of its own, which children do not inherit: what code prints between runs must not be a reply.
    replies = os.dup(1)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 1)
    namespace: dict[str, Any] = {"__name__": _MODULE, "__builtins__": builtins, **helpers()}
    authorize(options["imports"])
    os.mkfifo(pipe)
    os.write(replies, b'{"id": 0}\n')
    while True:
        with open(pipe, encoding="utf-8") as requests:
            for line in requests:
                request = json.loads(line)
                reply = {"id": request["id"], **run(request["code"], namespace, request["id"])}
                os.write(replies, json.dumps(reply).encode() + b"\n")


def limit_resources(memory_mb: int | None, max_file_mb: int | None) -> None:
    """Limit memory and files; where the sandbox has limits of its own, there are none to set."""
    import resource

    for kind, megabytes in ((resource.RLIMIT_AS, memory_mb), (resource.RLIMIT_FSIZE, max_file_mb)):
        if megabytes is not None:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (megabytes * 1024 * 1024,) * 2)


def helpers() -> dict[str, Callable[..., str]]:
    """Return the functions that code finds beside Python's own."""
    return {
        "format_exc": traceback.format_exc,
        "safe_json_dumps": lambda value: json.dumps(value, default=repr),
    }


def authorize(imports: Sequence[str]) -> None:
    """Let the code itself import only these modules and what is below them; `*` is all.

    Modules import what they need. This guides a model, it confines nothing: that is for the sandbox.
    """
    original = builtins.__import__
    allowed = {name.removesuffix(".*") for name in imports}

    def guarded(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        is_own_code = bool(globals) and globals.get("__name__") == _MODULE
        if is_own_code and "*" not in allowed and level == 0:
            parts = name.split(".")
            if not any(".".join(parts[:end]) in allowed for end in range(1, len(parts) + 1)):
                raise ImportError(f"Import of {name} is not allowed. Authorized imports are: {sorted(allowed)}")
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = guarded


def run(code: str, namespace: dict[str, Any], number: int) -> dict[str, Any]:
    """Run a piece of code; return what it printed, its value and how it ended."""
    exit_code, errors, value = 0, "", None
    with _captured() as captured:
        try:
            value = _evaluate(code, namespace, f"<code {number}>")
        except SystemExit as exc:
            exit_code = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
            errors = exc.code if isinstance(exc.code, str) else ""
        except BaseException as exc:  # the boundary of the code
            exit_code, errors = 1, _formatted(exc)
    stdout, stderr = captured
    parts = [stdout] if stdout else []
    if value is not None:
        parts.append(_shown(value))
    return {"stdout": "\n".join(parts), "stderr": "\n".join(filter(None, (stderr, errors))), "exit_code": exit_code}


def _evaluate(code: str, namespace: dict[str, Any], name: str) -> Any:
    """Run all statements; return the value of the last one where it is an expression or an assignment."""
    # Tracebacks show the lines of the code, as if it were a file.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    result: ast.expr | None = None
    if tree.body:
        last = tree.body[-1]
        if isinstance(last, ast.Expr):
            result = last.value
            tree.body.pop()
        elif isinstance(last, ast.Assign | ast.AugAssign | ast.AnnAssign) and getattr(last, "value", None) is not None:
            target = last.targets[-1] if isinstance(last, ast.Assign) else last.target
            if isinstance(target, ast.Name):
                result = ast.copy_location(ast.Name(target.id, ast.Load()), target)
    exec(_compiled(tree, name, "exec"), namespace)
    return None if result is None else eval(_compiled(ast.Expression(result), name, "eval"), namespace)


def _compiled(tree: ast.AST, name: str, mode: str) -> CodeType:
    code: CodeType = compile(tree, name, mode)  # type: ignore[call-overload]
    return code


def _formatted(error: BaseException) -> str:
    """Return the traceback without the frames of this program."""
    if isinstance(error, SyntaxError) and str(error.filename).startswith("<code "):
        return "".join(traceback.format_exception_only(type(error), error))
    described = traceback.TracebackException.from_exception(error)
    described.stack = traceback.StackSummary.from_list([one for one in described.stack if one.filename != __file__])
    return "".join(described.format())


def _shown(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return repr(value)
    except Exception as exc:  # a __repr__ of the code's own
        return f"<{type(value).__name__} whose repr() fails: {type(exc).__name__}>"


class _captured:
    """Send what is printed, also by child processes, to files; the two texts are there after the block."""

    def __enter__(self) -> list[str]:
        self._texts: list[str] = []
        self._files = [os.memfd_create(name) if hasattr(os, "memfd_create") else _unnamed() for name in ("out", "err")]
        self._kept = [os.dup(1), os.dup(2)]
        for number, file in enumerate(self._files, 1):
            os.dup2(file, number)
        return self._texts

    def __exit__(self, *exc_info: object) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # the code may have closed or replaced it
                stream.flush()
        for number, (file, kept) in enumerate(zip(self._files, self._kept, strict=True), 1):
            os.dup2(kept, number)
            os.close(kept)
            self._texts.append(_read(file))
            os.close(file)


def _unnamed() -> int:
    import tempfile

    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _read(file: int) -> str:
    size = os.lseek(file, 0, os.SEEK_END)
    os.lseek(file, 0, os.SEEK_SET)
    data = b""
    while len(data) < MAX_OUTPUT and (part := os.read(file, MAX_OUTPUT - len(data))):
        data += part
    left = size - len(data)
    return data.decode("utf-8", "replace") + (f"\n... {left} bytes more" if left > 0 else "")


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
