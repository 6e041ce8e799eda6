#!/usr/bin/env python3
"""Closed-loop load generator for servers that speak the OpenEnv wire protocol.

Standard library only: blocking sockets driven by one epoll loop, prebuilt request bytes, and replies that are
measured, not decoded (the first reply of every session is decoded and checked in full; all later ones are checked
for an error). Each session has one request in flight and sends the next when the reply is complete.

  loadgen.py --url http://127.0.0.1:8000 --mode ws --sessions 64 --seconds 5
  modes: ws (reset/step on /ws), http (POST /step, keep-alive; with --http-session each connection first opens a
         session of its own), mcp (tools/call in an mcp message on /ws), mcp-http (POST /mcp; with --http-session each
         connection first creates a session of its own and names it in every call)

It prints one JSON object. Sessions that cannot be opened or break are counted in "errors" and the rest goes on.
With --rate, a session waits between its requests, so that two servers get the same load. SIGTERM ends the load early.
With --pid, the server's CPU, memory and threads are read from /proc for that process and its descendants, and the cores
of both sides are reported; if they share cores, a warning goes to stderr.
Loopback and unix sockets only.
"""

from __future__ import annotations

import argparse
import base64
import contextlib
import heapq
import itertools
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from connection import Connection, client_frame
from procfs import (
    ProcessStats,
    core_list,
    cores_of,
    machine_cpu_s,
    process_stats,
    raise_file_limit,
    sharing_warning,
)

SESSION_HEADER = "X-OpenEnv-Session"
SESSION_MARK = "{session}"
STALL_S = 60.0
clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class Round:
    """What one stretch of the closed loop did."""

    steps: int
    errors: int
    seconds: float
    received: int
    polls: int


@dataclass(frozen=True, slots=True)
class Usage:
    """CPU spent by the load generator, the server and the machine up to now."""

    own_s: float
    machine_s: float
    server: ProcessStats

    @classmethod
    def now(cls, pid: int) -> Usage:
        """Take a reading."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        return cls(own_s=own.ru_utime + own.ru_stime, machine_s=machine_cpu_s(), server=process_stats(pid))


def quantile(ordered: Sequence[float], q: float) -> float:
    """Return the q-quantile of an ordered sequence; 0 when it is empty."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))] if ordered else 0.0


def compact(value: object) -> bytes:
    """Dump as JSON without spaces."""
    return json.dumps(value, separators=(",", ":")).encode()


class Load:
    """The sessions, their requests and the loop that drives them."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        url = urlsplit(options.url)
        self.unix = url.path if url.scheme == "unix" else None
        self.address = (url.hostname or "localhost", url.port or 80)
        if not self.unix and self.address[0] not in ("localhost", "::1") and not self.address[0].startswith("127."):
            raise SystemExit("loopback addresses only")
        self.host = f"{self.address[0]}:{self.address[1]}"
        self.ports = itertools.cycle([self.address[1], *options.also_port])
        self.is_ws = options.mode in ("ws", "mcp")
        self.epoll = select.epoll()
        self.connections: dict[int, Connection] = {}
        self.lost: list[str] = []
        self.stop_at = 0.0
        self.step_body = self._step_body()
        self.expect = None if options.action else "x" * options.payload

    def _step_body(self) -> bytes:
        options = self.options
        text = "x" * options.payload
        call = {"name": options.tool, "arguments": {"message": text}}
        rpc = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": call}
        action = json.loads(options.action) if options.action else {"message": text}
        if options.mode == "mcp-http":
            return compact({**rpc, "params": {**call, "session_id": SESSION_MARK}} if options.http_session else rpc)
        if options.mode == "http":
            return compact({"action": action})
        if options.mode == "mcp":
            return compact({"type": "mcp", "data": rpc})
        return compact({"type": "state"} if options.message == "state" else {"type": options.message, "data": action})

    def step_request(self, session: str | None = None) -> bytes:
        """Build the request that is repeated; over HTTP it may name its session."""
        if self.is_ws:
            return client_frame(self.step_body)
        if self.options.mode == "mcp-http":
            return self.post("/mcp", self.step_body.replace(SESSION_MARK.encode(), (session or "").encode()))
        return self.post("/step", self.step_body, session=session)

    def post(self, path: str, body: bytes, *, session: str | None = None) -> bytes:
        """Build a POST request."""
        named = f"{SESSION_HEADER}: {session}\r\n" if session else ""
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self.host}\r\nContent-Type: application/json\r\n"
            f"{named}Content-Length: {len(body)}\r\n\r\n"
        )
        return head.encode() + body

    def session_request(self) -> bytes:
        """Build the request that opens a session over HTTP."""
        if self.options.mode == "mcp-http":
            return self.post("/mcp", compact({"jsonrpc": "2.0", "id": 0, "method": "openenv/session/create"}))
        return self.post("/reset", b"{}", session="new")

    def session_of(self, connection: Connection) -> str:
        """Return the session that a connection has opened."""
        if self.options.mode == "mcp-http":
            reply: dict[str, Any] = json.loads(connection.body)
            return str(reply["result"]["session_id"])
        session = connection.header(SESSION_HEADER)
        if not session:
            raise SystemExit(f"the server answered no {SESSION_HEADER}: it has no stateful HTTP")
        return session

    def upgrade(self) -> bytes:
        """Build the WebSocket upgrade request."""
        deflate = "Sec-WebSocket-Extensions: permessage-deflate\r\n" if self.options.deflate else ""
        return (
            f"GET /ws HTTP/1.1\r\nHost: {self.host}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
            f"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: {base64.b64encode(os.urandom(16)).decode()}\r\n"
            f"{deflate}\r\n"
        ).encode()

    def connect(self, request: bytes) -> Connection:
        """Open a connection and watch it."""
        if self.unix:
            sock = socket.socket(socket.AF_UNIX)
            sock.connect(self.unix)
        else:
            sock = socket.create_connection((self.address[0], next(self.ports)), timeout=STALL_S)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.settimeout(None)
        connection = Connection(sock, is_ws=self.is_ws, request=request)
        self.connections[sock.fileno()] = connection
        self.epoll.register(sock.fileno(), select.EPOLLIN)
        return connection

    def drop(self, fd: int, why: object) -> None:
        """Give a session up and remember why."""
        self.lost.append(str(why))
        connection = self.connections.pop(fd)
        self.epoll.unregister(fd)
        connection.sock.close()

    def setup(self) -> None:
        """Open every session (connect, upgrade, reset) with --ramp of them in progress."""
        todo, busy, limit = self.options.sessions, 0, clock() + self.options.setup_timeout
        request, reset = self.step_request(), client_frame(b'{"type":"reset","data":{}}')
        opening = self.upgrade() if self.is_ws else self.session_request() if self.options.http_session else request
        while todo or busy:
            if clock() > limit:
                self.abandon(todo)
                return
            while todo and busy < self.options.ramp:
                todo -= 1
                try:
                    self.connect(request).send(opening)
                    busy += 1
                except OSError as error:
                    self.lost.append(str(error))
            for fd, _ in self.epoll.poll(1):
                was_ready = self.connections[fd].ready  # an idle connection may be closed while others are set up
                try:
                    if self.advance(self.connections[fd], reset):
                        busy -= not was_ready
                except OSError as error:
                    self.drop(fd, error)
                    busy -= not was_ready

    def abandon(self, todo: int) -> None:
        """Give up the sessions that were not opened in time."""
        self.lost += ["set-up timed out"] * todo
        for fd in [fd for fd, connection in self.connections.items() if not connection.ready]:
            self.drop(fd, "set-up timed out")

    def advance(self, connection: Connection, reset: bytes) -> bool:
        """Take one read's worth of a session's set-up; return whether it is ready."""
        data = connection.recv(65536)
        if not data:
            raise ConnectionError("server closed a connection during set-up")
        if not connection.upgraded:
            rest = connection.feed_upgrade(data)
            if rest is None:
                return False
            if self.options.deflate and "permessage-deflate" not in (
                connection.header("Sec-WebSocket-Extensions") or ""
            ):
                raise ConnectionError("server did not accept permessage-deflate")
            connection.send(reset)
            data = rest
        if not data or not connection.feed(data):
            return False
        if connection.failed():
            status = b"" if self.is_ws else connection.head[:4]
            raise ConnectionError(f"error at set-up: {(status + connection.body)[:160].decode('utf-8', 'replace')}")
        if self.options.http_session:
            connection.request = self.step_request(self.session_of(connection))
        connection.ready = True
        return True

    def check(self, connection: Connection) -> None:
        """Decode a session's first reply and compare it with what was asked for."""
        options = self.options
        if options.deflate or connection.failed():
            return
        reply: dict[str, Any] = json.loads(connection.body)
        inner = reply["data"] if self.is_ws else reply
        if options.mode == "ws" and reply["type"] != {"step": "observation"}.get(options.message, options.message):
            raise SystemExit(f"unexpected reply: {str(reply)[:200]}")
        echoes = options.mode in ("ws", "http") and self.expect is not None and options.message == "step"
        if echoes and inner["observation"][options.field] != self.expect:
            raise SystemExit(f"wrong echo: {str(inner)[:200]}")
        if options.mode.startswith("mcp") and (inner.get("error") or (self.expect or "") not in json.dumps(inner)):
            raise SystemExit(f"wrong tool result: {str(reply)[:300]}")

    def steps(self, seconds: float, latencies: array[float]) -> Round:
        """Run the closed loop for that many seconds, then wait for the replies under way."""
        connections, poll, add = self.connections, self.epoll.poll, latencies.append
        size, errors, received, polls = 8192, 0, 0, 0
        fast_len, fast_head = -1, b""  # a reply that looks like the last good one needs no parsing
        interval = len(connections) / self.options.rate if self.options.rate else 0.0
        resting: list[tuple[float, int]] = []  # a heap: when the next request of a connection is due
        start = now = clock()
        self.stop_at = start + seconds
        for fd, connection in list(connections.items()):
            connection.t0 = clock()
            try:
                connection.send(connection.request)
            except OSError as error:
                self.drop(fd, error)
        pending = len(connections)
        while pending:
            pending -= self.resume(resting)
            if not pending:
                break
            events = poll(min(5.0, max(0.0, resting[0][0] - clock())) if resting else 5)
            polls += 1
            if not events and not resting and clock() > self.stop_at + self.options.stall:
                errors += pending
                break
            for fd, _ in events:
                connection = connections[fd]
                try:
                    data = connection.recv(size)
                    n = len(data)
                    received += n
                    slow = connection.left or connection.buf or connection.keep
                    if n == fast_len and not slow and data.startswith(fast_head):
                        now = clock()
                        add(now - connection.t0)
                    else:
                        if not data:
                            raise ConnectionError("server closed a connection under load")
                        if n == size and size < 1 << 20:
                            size *= 2
                        whole = not (connection.left or connection.buf)
                        if not connection.feed(data):
                            continue
                        now = clock()
                        add(now - connection.t0)
                        if connection.keep:
                            self.check(connection)
                            connection.keep, connection.body = False, b""
                        if connection.failed():
                            errors += 1
                        elif whole and not connection.buf:
                            fast_len, fast_head = n, data[:30]
                    if now >= self.stop_at:
                        pending -= 1
                    elif interval and connection.t0 + interval > now:
                        heapq.heappush(resting, (connection.t0 + interval, fd))
                    else:
                        connection.t0 = now
                        connection.send(connection.request)
                except OSError as error:
                    self.drop(fd, error)
                    pending -= 1
        return Round(steps=len(latencies), errors=errors, seconds=now - start, received=received, polls=polls)

    def resume(self, resting: list[tuple[float, int]]) -> int:
        """Send the requests that are due; return how many sessions send no more."""
        ended = 0
        while resting and (resting[0][0] <= (now := clock()) or now >= self.stop_at):
            fd = heapq.heappop(resting)[1]
            connection = self.connections.get(fd)
            if connection is None:  # dropped, and counted, while it rested
                continue
            if now >= self.stop_at:
                ended += 1
                continue
            connection.t0 = now
            try:
                connection.send(connection.request)
            except OSError as error:
                self.drop(fd, error)
                ended += 1
        return ended

    def end(self) -> None:
        """Send no more requests; the figures are for the time until now."""
        self.stop_at = 0.0

    def in_step(self, word: str) -> None:
        """With --in-step: say how far this is, and wait for a line, so that several generators begin together."""
        if self.options.in_step:
            print(word, flush=True)
            sys.stdin.readline()

    def run(self) -> dict[str, Any]:
        """Open the sessions, load them, close them, and return the figures."""
        options = self.options
        self.in_step("start")
        idle, start = process_stats(options.pid), clock()
        self.setup()
        setup_s, up = clock() - start, process_stats(options.pid)
        opened = len(self.connections)
        if not opened:
            raise SystemExit(f"no session could be opened: {self.lost[0]}")
        self.in_step("ready")
        if options.warmup:
            self.steps(options.warmup, array("d"))
        for connection in self.connections.values():
            connection.keep = True
        latencies: array[float] = array("d")
        before = Usage.now(options.pid)
        done = self.steps(options.seconds, latencies)
        after = Usage.now(options.pid)
        report = self.figures(done, latencies=sorted(latencies), before=before, after=after)
        report["setup_per_s"] = round(opened / setup_s, 1)
        report["opened"], report["setup_s"] = opened, round(setup_s, 3)
        if options.pid:
            report["server_setup_cpu_us"] = round((up.cpu_s - idle.cpu_s) / opened * 1e6)
            report["rss_kb_per_session"] = round((after.server.rss_kb - idle.rss_kb) / opened, 1)
        report["close_per_s"] = round(len(self.connections) / self.close(), 1)
        return report

    def figures(self, done: Round, *, latencies: list[float], before: Usage, after: Usage) -> dict[str, Any]:
        """Turn readings into the reported figures."""
        options, steps = self.options, max(done.steps, 1)
        own = after.own_s - before.own_s
        report: dict[str, Any] = {
            "label": options.label,
            "mode": options.mode,
            "sessions": options.sessions,
            "payload": options.payload,
            "steps": done.steps,
            "errors": done.errors + len(self.lost),
            "first_error": self.lost[0] if self.lost else "",
            "seconds": round(done.seconds, 3),
            "steps_per_s": round(done.steps / done.seconds, 1) if done.steps else 0.0,
            "p50_ms": round(quantile(latencies, 0.5) * 1e3, 3),
            "p99_ms": round(quantile(latencies, 0.99) * 1e3, 3),
            "max_ms": round(latencies[-1] * 1e3, 3) if latencies else 0.0,
            "reply_bytes": done.received // steps,
            "loadgen_cpu_us_per_step": round(own / steps * 1e6, 1),
            "loadgen_busy": round(own / max(done.seconds, 1e-9), 2),
            "replies_per_poll": round(done.steps / max(done.polls, 1), 2),
        }
        if options.pid:
            cpu = after.server.cpu_s - before.server.cpu_s
            foreign = max(0.0, after.machine_s - before.machine_s - cpu - own)
            report |= {
                # cores kept busy by everything else: a measure of how far to trust the row
                "foreign_cores": round(foreign / max(done.seconds, 1e-9), 2),
                "server_cpu_us_per_step": round(cpu / steps * 1e6, 1),
                "server_busy": round(cpu / max(done.seconds, 1e-9), 2),
                "server_rss_mb": round(after.server.rss_kb / 1024, 1),
                "server_threads": after.server.threads,
            }
            report |= self.cores()
        return report

    def cores(self) -> dict[str, Any]:
        """Return the cores of both sides; warn on stderr if they share some."""
        server, own = cores_of(self.options.pid), cores_of(0)
        warning = sharing_warning(server, own)
        if warning:
            print(warning, file=sys.stderr)
        return {
            "server_cores": core_list(server),
            "generator_cores": core_list(own),
            "shared_cores": len(server & own),
        }

    def close(self) -> float:
        """Close every session in order and return the seconds it took."""
        start = clock()
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                if self.is_ws:
                    connection.send(client_frame(b'{"type":"close"}'))
                connection.sock.shutdown(socket.SHUT_WR)
        for connection in self.connections.values():
            with contextlib.suppress(OSError):
                connection.sock.settimeout(30)
                while connection.recv(1 << 16):
                    pass
            connection.sock.close()
        return clock() - start


def main() -> None:
    """Run one load and print its figures."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--url", default="http://127.0.0.1:8000", help="http://127.0.0.1:PORT or unix:/path")
    p.add_argument("--also-port", type=int, nargs="*", default=[], help="sessions take turns with servers there")
    p.add_argument("--mode", choices=["ws", "http", "mcp", "mcp-http"], default="ws")
    p.add_argument("--http-session", action="store_true", help="http, mcp-http: open a session first, and name it")
    p.add_argument("--sessions", type=int, default=1)
    p.add_argument("--seconds", type=float, default=5)
    p.add_argument("--warmup", type=float, default=0.5)
    p.add_argument("--rate", type=float, default=0, help="most requests per second, all sessions together")
    p.add_argument("--payload", type=int, default=100, help="characters in the message")
    p.add_argument("--message", choices=["step", "state", "reset"], default="step", help="ws: which message")
    p.add_argument("--action", help="ws, http: JSON to send as the action instead of {message}")
    p.add_argument("--field", default="echoed", help="observation field that must equal the message")
    p.add_argument("--tool", default="echo", help="mcp: tool name; it gets {message}")
    p.add_argument("--ramp", type=int, default=32, help="sessions being set up at once")
    p.add_argument("--setup-timeout", type=float, default=120)
    p.add_argument("--stall", type=float, default=STALL_S, help="seconds to wait for the last replies")
    p.add_argument("--deflate", action="store_true", help="offer permessage-deflate (requests stay plain)")
    p.add_argument("--pid", type=int, default=0, help="server process")
    p.add_argument("--in-step", action="store_true", help="wait for a line before the set-up, and before the load")
    p.add_argument("--label", default="")
    raise_file_limit()
    load = Load(p.parse_args())
    signal.signal(signal.SIGTERM, lambda *_: load.end())
    print(json.dumps(load.run()))


if __name__ == "__main__":
    main()
