"""Checks of a running server that need no package: its endpoints, and sessions as any client opens them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from ...client.network import with_token
from ...errors import message_of
from .package import check
from .probe import Probe
from .rules import RULES

_UNKNOWN = "unknown"
_CONTROLS = ("/reset", "/step", "/state")


@dataclass(frozen=True, slots=True)
class Criterion:
    """One check of a server, with what was expected and what came back."""

    id: str
    description: str
    passed: bool
    required: bool = True
    details: str | None = None
    expected: dict[str, Any] = field(default_factory=dict)
    actual: dict[str, Any] = field(default_factory=dict)
    fix: str | None = None

    def json(self) -> dict[str, Any]:
        """Return the criterion as an entry of the report, without empty fields."""
        core = {"id": self.id, "description": self.description, "passed": self.passed, "required": self.required}
        more = {"details": self.details, "expected": self.expected, "actual": self.actual, "remediation": self.fix}
        return {**core, **{name: value for name, value in more.items() if value}}


@dataclass(frozen=True, slots=True)
class RunningReport:
    """The outcome of all checks of a running server."""

    target: str
    version: str
    mode: str
    criteria: tuple[Criterion, ...]

    @property
    def passed(self) -> bool:
        """Whether all required criteria passed."""
        return all(one.passed for one in self.criteria if one.required)

    @property
    def profile(self) -> str:
        """The kind of interface that the server has."""
        major = self.version.partition(".")[0]
        return f"openenv-http/{major}.x" if major.isdigit() else f"openenv-http/{_UNKNOWN}"

    def json(self) -> dict[str, Any]:
        """Return the report."""
        required = [one for one in self.criteria if one.required]
        return {
            "target": self.target,
            "validation_type": "running_environment",
            "standard_version": self.version,
            "standard_profile": self.profile,
            "mode": self.mode,
            "passed": self.passed,
            "summary": {
                "passed_count": sum(one.passed for one in self.criteria),
                "total_count": len(self.criteria),
                "failed_criteria": [one.id for one in self.criteria if not one.passed],
                "required_passed_count": sum(one.passed for one in required),
                "required_total_count": len(required),
            },
            "criteria": [one.json() for one in self.criteria],
        }


def check_running(
    url: str, *, timeout_s: float, token: str | None, with_episodes: bool, listen: Callable[[Criterion], None]
) -> RunningReport:
    """Check a running server: its endpoints, and where it may be reset and stepped, sessions too.

    Args:
        url: Where it is.
        timeout_s: How long an answer over HTTP may take.
        token: What the server asks for.
        with_episodes: Whether to open sessions.
        listen: Called with each result as it comes.
    """
    url = url.rstrip("/")
    criteria: list[Criterion] = []

    def add(one: Criterion) -> Criterion:
        criteria.append(one)
        listen(one)
        return one

    ask = _Requests(url, timeout_s, token)
    opening = add(_openapi(ask))
    version = str(opening.actual.get("info.version", _UNKNOWN)) if opening.passed else _UNKNOWN
    for criterion in (_health, _metadata, _schema, _mcp):
        add(criterion(ask))
    consistency = add(_mode(ask.paths))
    mode = str(consistency.actual.get("mode", _UNKNOWN))
    if with_episodes and mode == "simulation" and all(one.passed for one in criteria):
        probe = Probe(url, token=token, http_timeout_s=max(timeout_s, 10.0))
        for rule in RULES:
            if rule.any_server and (result := check(rule.id, probe)).status != "skip":
                details = "; ".join(result.evidence) or None
                passed, actual = result.status == "pass", result.measured
                add(Criterion(rule.id, rule.says, passed, False, details, {}, actual, result.remediation))
    return RunningReport(url, version, mode, tuple(criteria))


class _Requests:
    """Sends requests to a server, and remembers the paths of its OpenAPI document."""

    def __init__(self, url: str, timeout_s: float, token: str | None) -> None:
        self.paths: set[str] | None = None
        self._url = url
        self._timeout_s = timeout_s
        self._headers = with_token(None, token)

    def __call__(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Return the status and the JSON of the reply; raise ValueError where there is none."""
        options: dict[str, Any] = {} if body is None else {"json": body}
        try:
            reply = httpx2.request(
                method,
                self._url + path,
                headers=self._headers,
                timeout=self._timeout_s,
                trust_env=False,
                follow_redirects=True,
                **options,
            )
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = f"{type(error).__name__}: {message_of(error)}"
            raise ValueError(f"{method} {path} was not answered ({reason})") from error
        try:
            return reply.status_code, reply.json()
        except ValueError as error:
            raise ValueError(f"{method} {path} answered {reply.status_code} with no JSON") from error


def _criterion(
    ask: _Requests, id_: str, says: str, request: tuple[Any, ...], expected: dict[str, Any], judge: Callable[[Any], Any]
) -> Criterion:
    """Send a request; `judge` returns whether the body is right, and the part of it that the report shows."""
    wanted = {"status_code": 200, **expected}
    try:
        status, body = ask(*request)
    except ValueError as error:
        return Criterion(id_, says, False, details=str(error), expected=wanted)
    right, shown = judge(body if isinstance(body, dict) else {})
    actual = {"status_code": status, **shown}
    details = None
    if status == 401:
        details = "the server asks for a token: --token, or OPENENV_TOKEN"
    elif status != 200 or not right:
        details = f"answered {status} with {str(body)[:120]}"
    return Criterion(id_, says, status == 200 and bool(right), details=details, expected=wanted, actual=actual)


def _openapi(ask: _Requests) -> Criterion:
    def judge(body: Any) -> tuple[bool, dict[str, Any]]:
        if isinstance(body.get("paths"), dict):
            ask.paths = set(body["paths"])
        info = body.get("info")
        version = info.get("version") if isinstance(info, dict) else None
        return isinstance(version, str), {"info.version": version}

    says = "GET /openapi.json gives the version of the interface"
    request = ("GET", "/openapi.json")
    return _criterion(ask, "openapi_version_available", says, request, {"info.version": "string"}, judge)


def _health(ask: _Requests) -> Criterion:
    def judge(body: Any) -> tuple[bool, dict[str, Any]]:
        return body.get("status") == "healthy", {"status": body.get("status")}

    says = "GET /health says healthy"
    return _criterion(ask, "health_endpoint", says, ("GET", "/health"), {"status": "healthy"}, judge)


def _metadata(ask: _Requests) -> Criterion:
    def judge(body: Any) -> tuple[bool, dict[str, Any]]:
        shown = {name: body.get(name) for name in ("name", "description")}
        return all(isinstance(value, str) for value in shown.values()), shown

    says = "GET /metadata gives name and description"
    return _criterion(ask, "metadata_endpoint", says, ("GET", "/metadata"), {"fields": ["name", "description"]}, judge)


def _schema(ask: _Requests) -> Criterion:
    names = ["action", "observation", "state"]

    def judge(body: Any) -> tuple[bool, dict[str, Any]]:
        kinds = {name: type(body.get(name)).__name__ for name in names}
        return all(kind == "dict" for kind in kinds.values()), kinds

    says = "GET /schema gives the schemas of action, observation and state"
    return _criterion(ask, "schema_endpoint", says, ("GET", "/schema"), {"fields": names}, judge)


def _mcp(ask: _Requests) -> Criterion:
    def judge(body: Any) -> tuple[bool, dict[str, Any]]:
        return body.get("jsonrpc") == "2.0", {"jsonrpc": body.get("jsonrpc")}

    says = "POST /mcp answers in JSON-RPC"
    return _criterion(ask, "mcp_endpoint", says, ("POST", "/mcp", {}), {"jsonrpc": "2.0"}, judge)


def _mode(paths: set[str] | None) -> Criterion:
    says = "the endpoints are those of one mode: reset, step and state all there, or none"
    id_ = "mode_endpoint_consistency"
    if paths is None:
        missing = {"openapi.paths": "missing"}
        reason = "the mode is not known without the paths of /openapi.json"
        return Criterion(id_, says, False, details=reason, expected={"openapi.paths": "present"}, actual=missing)
    mode = "simulation" if "/reset" in paths else "production"
    there = {path: path in paths for path in _CONTROLS}
    right = all(there.values()) if mode == "simulation" else not any(there.values())
    expected = {"mode": mode, **dict.fromkeys(_CONTROLS, mode == "simulation")}
    details = None if right else f"a server in {mode} mode, but {there}"
    return Criterion(id_, says, right, details=details, expected=expected, actual={"mode": mode, **there})
