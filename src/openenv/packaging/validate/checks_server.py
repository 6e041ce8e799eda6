"""Checks of a running server that need no package: its endpoints, and sessions as any client opens them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

from openenv.errors import message_of

from .checks_behaviour import run_check
from .probe import Probe
from .rules import RULES, CheckStatus

_UNKNOWN = "unknown"
_CONTROLS = ("/reset", "/step", "/state")


@dataclass(frozen=True, slots=True)
class Criterion:
    """One check of a server, with the expected and the actual result."""

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
    """Check a running server: its endpoints, and sessions if the caller may reset and step.

    Args:
        url: The server's address.
        timeout_s: How long an answer over HTTP may take.
        token: The token that the server requires.
        with_episodes: Whether to open sessions.
        listen: Called with each result as it comes.
    """
    url = url.rstrip("/")
    criteria: list[Criterion] = []

    def add(one: Criterion) -> Criterion:
        criteria.append(one)
        listen(one)
        return one

    # The same probe as for packages, without a package.
    probe = Probe(url=url, token=token, http_timeout_s=timeout_s)
    bodies = {}
    for endpoint in _ENDPOINTS:
        criterion, bodies[endpoint.id] = endpoint.check(probe)
        add(criterion)
    # The first endpoint is the OpenAPI document, which names the version.
    version = str(criteria[0].actual["info.version"]) if criteria[0].passed else _UNKNOWN
    consistency = add(_mode(bodies[_OPENAPI].get("paths")))
    mode = str(consistency.actual.get("mode", _UNKNOWN))
    # Sessions are opened only on servers that are right so far: a broken one would repeat its fault in every check.
    if with_episodes and mode == "simulation" and all(one.passed for one in criteria):
        # Episodes take longer than the endpoints that were timed by the caller.
        probe.http_timeout_s = max(timeout_s, 10.0)
        for rule in RULES:
            # Rules about a package's files or process do not apply here.
            if rule.any_server and (result := run_check(rule.id, probe)).status is not CheckStatus.SKIP:
                details = "; ".join(result.evidence) or None
                passed, actual = result.status is CheckStatus.PASS, result.measured
                add(Criterion(rule.id, rule.says, passed, False, details, {}, actual, result.remediation))
    return RunningReport(url, version, mode, tuple(criteria))


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """An endpoint that every server has."""

    id: str  # of the criterion
    request: str  # method and path
    says: str  # the required reply, as the end of a sentence that begins with the request
    fields: dict[str, Any]  # of the body: the value of each, or its type
    expected: dict[str, Any] | None = None  # the same in the words of the report; by default the values

    def check(self, probe: Probe) -> tuple[Criterion, dict[str, Any]]:
        """Send the request; return the criterion and the body, which may be empty."""
        says, expected = f"{self.request} {self.says}", {"status_code": 200, **(self.expected or self.fields)}
        try:
            status, reply = self._reply(probe)
        except ValueError as error:
            return Criterion(self.id, says, False, details=str(error), expected=expected), {}
        body = reply if isinstance(reply, dict) else {}
        passed = status == 200
        actual: dict[str, Any] = {"status_code": status}
        for name, wanted in self.fields.items():
            value: Any = body
            # "info.version" is the field `version` in the object `info`.
            for key in name.split("."):
                value = value.get(key) if isinstance(value, dict) else None
            # A type is expected where the value cannot be known, such as a schema.
            passed &= isinstance(value, wanted) if isinstance(wanted, type) else value == wanted
            actual[name] = type(value).__name__ if wanted is dict else value  # a whole schema would be too long
        details = None if passed else f"answered {status} with {str(reply)[:120]}"
        if status == 401:
            details = "the server asks for a token: --token, or OPENENV_TOKEN"
        return Criterion(self.id, says, passed, details=details, expected=expected, actual=actual), body

    def _reply(self, probe: Probe) -> tuple[int, Any]:
        """Return the status and the JSON of the reply; raise ValueError if the body is not JSON."""
        method, path = self.request.split()
        try:
            reply = probe.request(method, path, {} if method == "POST" else None)
        except (httpx2.HTTPError, httpx2.InvalidURL) as error:
            reason = f"{type(error).__name__}: {message_of(error)}"
            raise ValueError(f"{self.request} was not answered ({reason})") from error
        try:
            return reply.status_code, reply.json()
        except ValueError as error:
            raise ValueError(f"{self.request} answered {reply.status_code} with no JSON") from error


_OPENAPI = "openapi_version_available"
_TEXTS = ("name", "description")
_SCHEMAS = ("action", "observation", "state")
_ENDPOINTS = (
    _Endpoint(
        _OPENAPI,
        "GET /openapi.json",
        "gives the version of the interface",
        {"info.version": str},
        {"info.version": "string"},
    ),
    _Endpoint("health_endpoint", "GET /health", "says healthy", {"status": "healthy"}),
    _Endpoint(
        "metadata_endpoint",
        "GET /metadata",
        "gives name and description",
        dict.fromkeys(_TEXTS, str),
        {"fields": [*_TEXTS]},
    ),
    _Endpoint(
        "schema_endpoint",
        "GET /schema",
        "gives the schemas of action, observation and state",
        dict.fromkeys(_SCHEMAS, dict),
        {"fields": [*_SCHEMAS]},
    ),
    _Endpoint("mcp_endpoint", "POST /mcp", "answers in JSON-RPC", {"jsonrpc": "2.0"}),
)


def _mode(paths: Any) -> Criterion:
    says = "the endpoints are those of one mode: reset, step and state all there, or none"
    id_ = "mode_endpoint_consistency"
    if not isinstance(paths, dict):
        missing = {"openapi.paths": "missing"}
        reason = "the mode is not known without the paths of /openapi.json"
        return Criterion(id_, says, False, details=reason, expected={"openapi.paths": "present"}, actual=missing)
    mode = "simulation" if "/reset" in paths else "production"
    there = {path: path in paths for path in _CONTROLS}
    right = all(there.values()) if mode == "simulation" else not any(there.values())
    expected = {"mode": mode, **dict.fromkeys(_CONTROLS, mode == "simulation")}
    details = None if right else f"a server in {mode} mode, but {there}"
    return Criterion(id_, says, right, details=details, expected=expected, actual={"mode": mode, **there})
