"""The interpreter inside the sandbox: runs pieces of code one after another in one namespace.

This file is copied into the sandbox and run there by itself, so it uses the standard library alone. Requests and
replies are lines of JSON on a connection to the host. Code can do anything to this process: the host believes nothing
but what the code could have printed anyway.
"""

from __future__ import annotations

import ast
import json
import linecache
import os
import signal
import socket
import sys
import traceback
import types
from typing import Any


class OutputFile:
    """Replaces a descriptor by a file, so that what child processes write is kept as well; the host can read it too."""

    def __init__(self, descriptor: int, path: str, limit: int) -> None:
        # O_APPEND: a writer that outlives its step goes on at the end of a file that was emptied meanwhile.
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self._limit = limit
        os.dup2(self._file, descriptor)

    def take(self) -> str:
        """Return the beginning of what was written since the last call, and forget all of it."""
        size = os.fstat(self._file).st_size
        text = os.pread(self._file, self._limit, 0).decode("utf-8", "replace")
        os.ftruncate(self._file, 0)
        return text if size <= self._limit else f"{text}\n... ({size - self._limit} more bytes are left out)\n"


def run(code: str, name: str, namespace: dict[str, Any]) -> int:
    """Run code and return its exit code; as in a notebook, the value of a last expression is printed."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)  # tracebacks show the lines
    try:
        tree = ast.parse(code, name)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        traceback.print_exception(type(error), error, None)
        return 1
    try:
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), namespace)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), name, "eval"), namespace)
            if value is not None:
                print(repr(value))
    except SystemExit as error:
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    except BaseException as error:
        _print_exception(error)
        return 1
    return 0


def _print_exception(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:  # frames of this file say nothing
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)


def main(port: int, limit: int, folder: str) -> None:
    """Connect to the host and serve its requests until it hangs up."""
    connection = socket.create_connection(("127.0.0.1", port))
    requests = connection.makefile("rb")
    stdout, stderr = OutputFile(1, f"{folder}/stdout", limit), OutputFile(2, f"{folder}/stderr", limit)
    sys.path[0] = ""  # modules that the code writes can be imported
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module  # what is pickled or inspected finds the code's own names
    for number, line in enumerate(requests, start=1):
        request = json.loads(line)
        exit_code = 1
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # the code before may have changed it
            exit_code = run(request["code"], f"<step {number}>", vars(module))
            sys.stdout.flush()
            sys.stderr.flush()
        except (
            KeyboardInterrupt,
            OSError,
            ValueError,
        ) as error:  # an interrupt after the last line, or a closed stream
            os.write(2, f"{type(error).__name__}: {error}\n".encode())
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        reply = {"exit_code": exit_code, "stdout": stdout.take(), "stderr": stderr.take()}
        connection.sendall(json.dumps(reply).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
