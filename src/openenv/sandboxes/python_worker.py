"""The program inside the sandbox of a `PythonSession`: runs pieces of code in one namespace. Standard library only.

    python3 -I -B python_worker.py OPTIONS      OPTIONS is a JSON object, see `main`

Requests and replies are lines of JSON on a connection to the host. The code can do anything to this process, so the
host accepts only replies with output that the code could have printed anyway.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import json
import linecache
import os
import signal
import socket
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from typing import Any

VALUE_BYTES = 16 * 1024 * 1024
"""The longest value of a last line in a reply."""


def main(options: dict[str, Any]) -> None:
    """Connect to the host and answer its requests until it closes the connection.

    Args:
        options: `port` (of the host on 127.0.0.1), `folder` (for output files), `output_bytes` (kept of each stream),
            `imports` (a list, or null for every module), `paths` (folders of installed packages), `prints_values`,
            and `memory_mb` and `max_file_mb` (null if the sandbox sets its own limits).
    """
    limit_resources(options["memory_mb"], options["max_file_mb"])
    connection = socket.create_connection(("127.0.0.1", options["port"]))
    requests = connection.makefile("rb")
    limit, prints_values = options["output_bytes"], options["prints_values"]
    stdout, stderr = (OutputFile(number, f"{options['folder']}/{number}", limit) for number in (1, 2))
    sys.path.extend(path for path in options["paths"] if path not in sys.path)
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # pickle and inspect look the code's own names up there
    if not prints_values:
        vars(module).update(helpers())
    if options["imports"] is None:
        sys.path.insert(0, "")  # modules that the code writes can be imported
    else:
        restrict_imports(options["imports"], vars(module))
    connection.sendall(b'{"id": 0}\n')
    for line in requests:
        request = json.loads(line)
        if not prints_values:  # output of threads between two runs belongs to neither
            stdout.take()
            stderr.take()
        reply: dict[str, Any] = {"exit_code": 1, "value": None, "error": ""}
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the code before may have changed it
            reply = run(request["code"], f"<step {request['id']}>", vars(module), prints_values=prints_values)
            sys.stdout.flush()
            sys.stderr.flush()
        except (KeyboardInterrupt, Exception) as error:  # interrupted after its last line, or a closed stream
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        reply["error"] = cut(reply["error"], limit)
        reply.update(id=request["id"], stdout=stdout.take(), stderr=stderr.take())
        connection.sendall(json.dumps(reply).encode() + b"\n")


class OutputFile:
    """Replaces a descriptor by a file. It also receives the output of child processes, and the host can read it."""

    def __init__(self, descriptor: int, path: str, limit: int) -> None:
        # O_APPEND: a child process that outlives its step continues at the end of the emptied file.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self._limit = limit
        os.dup2(self._file, descriptor)

    def take(self) -> str:
        """Return the output since the last call, cut to the limit, and empty the file."""
        size = os.fstat(self._file).st_size
        text = os.pread(self._file, self._limit, 0).decode("utf-8", "replace")
        os.ftruncate(self._file, 0)
        return text if size <= self._limit else text + _left_out(size - self._limit)


def cut(text: str, limit: int) -> str:
    """Return at most that many bytes of a text, with a note if more was there."""
    data = text.encode("utf-8", "replace")
    return text if len(data) <= limit else data[:limit].decode("utf-8", "replace") + _left_out(len(data) - limit)


def _left_out(size: int) -> str:
    return f"\n... ({size} more bytes are left out)\n"


def limit_resources(memory_mb: int | None, max_file_mb: int | None) -> None:
    """Limit this process; None sets no limit."""
    import resource

    for kind, megabytes in ((resource.RLIMIT_AS, memory_mb), (resource.RLIMIT_FSIZE, max_file_mb)):
        if megabytes is not None:
            with contextlib.suppress(ValueError, OSError):
                resource.setrlimit(kind, (megabytes * 1024 * 1024,) * 2)


def helpers() -> dict[str, Callable[..., str]]:
    """Return the functions that the published `PyExecutor` offers to its code."""
    return {
        "format_exc": traceback.format_exc,
        "safe_json_dumps": lambda value: json.dumps(value, default=repr),
    }


def restrict_imports(imports: Sequence[str], namespace: dict[str, Any]) -> None:
    """Let the code import only these modules and their submodules; `*` allows all.

    The limit holds for the code itself; modules may import anything. It guides a model. The sandbox confines it.
    """
    original = builtins.__import__
    allowed = {name.removesuffix(".*") for name in imports}

    def guarded(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        if globals is namespace and "*" not in allowed and level == 0:
            parts = name.split(".")
            if not any(".".join(parts[:end]) in allowed for end in range(1, len(parts) + 1)):
                raise ImportError(f"Import of {name} is not allowed. Authorized imports are: {sorted(allowed)}")
        return original(name, globals, locals, fromlist, level)

    builtins.__import__ = guarded


def run(code: str, name: str, namespace: dict[str, Any], *, prints_values: bool) -> dict[str, Any]:
    """Run a piece of code and return its exit code, its error text and the value of its last line.

    Args:
        code: The code.
        name: The file name in tracebacks.
        namespace: The variables of the session.
        prints_values: Print the `repr` of a last expression, as a notebook does. Otherwise, return the value of a last
            expression or assignment as JSON, or as `repr` if it is not JSON.
    """
    value = None
    try:
        evaluated = _evaluate(code, namespace, name, with_assignments=not prints_values)
        if evaluated is not None:
            if prints_values:
                sys.stdout.write(f"{evaluated!r}\n")
            else:
                value = cut(_as_json(evaluated), VALUE_BYTES)
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return {"exit_code": int(error.code or 0), "error": "", "value": None}
        return {"exit_code": 1, "error": str(error.code), "value": None}
    except BaseException as error:  # the boundary of the code
        return {"exit_code": 1, "error": _formatted(error, name), "value": None}
    return {"exit_code": 0, "error": "", "value": value}


def _evaluate(code: str, namespace: dict[str, Any], name: str, *, with_assignments: bool) -> Any:
    """Run all statements; return the value of the last one if it is an expression, or an assignment to a name."""
    # Tracebacks show the lines of the code, as if it were a file.
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    tree = ast.parse(code, name)
    result: ast.expr | None = None
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        result = last.value
        tree.body.pop()
    elif with_assignments and isinstance(last, ast.Assign | ast.AugAssign | ast.AnnAssign) and last.value is not None:
        target = last.targets[-1] if isinstance(last, ast.Assign) else last.target
        if isinstance(target, ast.Name):
            result = ast.copy_location(ast.Name(target.id, ast.Load()), target)
    exec(_compiled(tree, name, "exec"), namespace)
    return None if result is None else eval(_compiled(ast.Expression(result), name, "eval"), namespace)


def _compiled(tree: ast.AST, name: str, mode: str) -> types.CodeType:
    code: types.CodeType = compile(tree, name, mode)  # type: ignore[call-overload]
    return code


def _formatted(error: BaseException, name: str) -> str:
    """Return the traceback without the frames of this program."""
    if isinstance(error, SyntaxError) and error.filename == name:
        return "".join(traceback.format_exception_only(type(error), error))
    described = traceback.TracebackException.from_exception(error)
    described.stack = traceback.StackSummary.from_list(
        [frame for frame in described.stack if frame.filename != __file__]
    )
    return "".join(described.format())


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        return repr(value)
    except Exception as error:  # a __repr__ that the code wrote
        return f"<{type(value).__name__} whose repr() fails: {type(error).__name__}>"


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
