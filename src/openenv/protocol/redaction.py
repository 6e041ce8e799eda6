"""Secrets in log lines: the only place that decides what a log must not contain, for servers, proxies and commands.

Log lines carry texts of others: addresses with a query, headers of a request, messages of HTTP libraries and engines.
`redacted` knows the places where credentials stand, and the forms of common API keys. A filter also knows the values of
this process's own secrets, wherever they stand.

    /ws?token=abc                    https://user:abc@host           Authorization: Bearer abc
    {'x-api-key': 'abc'}             (b'cookie', b'session=abc')     {"token": "abc"}         sk-abc...
"""

from __future__ import annotations

import functools
import logging
import re
from collections.abc import Iterable
from typing import Final

HIDDEN: Final = "***"
_SHORTEST: Final = 6  # a shorter value of a secret would hide parts of ordinary words

_QUERY_NAMES: Final = (
    r"(?:[\w-]*(?:token|secret|password|passwd|signature)|(?:x-)?(?:api|admin|access)?[_-]?key|auth|sig)"
)
_HEADERS: Final = (
    r"(?:proxy-)?authorization|cookie|set-cookie|(?:x-)?(?:[\w]+-)?api[_-]?key|x-auth-token|x-openenv-token"
)
_FIELDS: Final = r"[\w-]*(?:token|secret|password|api_?key|admin_?key|private_?key)"

# Each pattern has the part to keep as its group `kept`; the rest is hidden.
_PATTERNS: Final = (
    # token=abc in a query, a form or a list of settings
    rf"(?P<kept>(?<![\w-]){_QUERY_NAMES}=)(?!{re.escape(HIDDEN)})[^&\s\"'#;,)\]}}]+",
    # scheme://user:abc@host
    r"(?P<kept>://)[^/\s@\"']+(?=@)",
    # Bearer abc
    r"(?P<kept>\b(?:bearer|basic)\s+)[\w.~+/=-]{6,}",
    # 'x-api-key': 'abc'    (b'cookie', b'a=abc')    "token": "abc"
    rf"(?P<kept>['\"](?:{_HEADERS}|{_FIELDS})['\"]\s*[:,]\s*b?(?P<quote>['\"]))(?:\\.|(?!(?P=quote)).)+",
    # x-api-key: abc    Cookie: a=abc; b=abc
    rf"(?P<kept>(?<![\w-])(?:{_HEADERS}):(?![ \t]*{re.escape(HIDDEN)})[ \t]*)[^\s'\"][^\r\n'\"]*",
    # sk-abc..., hf_abc...: keys of well-known services
    r"(?P<kept>\b(?:sk-|hf_|gh[opsru]_|github_pat_|xox[abp]-|AIza))[\w-]{12,}",
)


@functools.cache
def _compiled() -> tuple[re.Pattern[str], ...]:
    """Compile the patterns at the first line: most commands log nothing."""
    return tuple(re.compile(pattern, re.IGNORECASE) for pattern in _PATTERNS)


def redacted(text: str, values: Iterable[str] = ()) -> str:
    """Return a text with `***` in place of credentials.

    Args:
        text: The text.
        values: Secrets to hide wherever they stand.
    """
    for value in values:
        if value in text:
            text = text.replace(value, HIDDEN)
    for pattern in _compiled():
        text = pattern.sub(_hide, text)
    return text


def _hide(match: re.Match[str]) -> str:
    return f"{match['kept']}{HIDDEN}"


# Attributes of a record that no caller has set.
_OWN: Final = frozenset(vars(logging.makeLogRecord({}))) - {"exc_text", "stack_info"} | {"message", "asctime"}


class RedactSecrets(logging.Filter):
    """Redacts the messages, tracebacks and extra fields of all lines of a handler.

    Args:
        values: Secrets to hide wherever they stand; short ones are ignored.
    """

    def __init__(self, values: Iterable[str] = ()) -> None:
        super().__init__()
        # The longest first: one secret may contain another.
        self._values = sorted({value for value in values if len(value) >= _SHORTEST}, key=len, reverse=True)

    def filter(self, record: logging.LogRecord) -> bool:
        """Change a record in place; keep it."""
        message = record.getMessage()
        clean = self._clean(message)
        if clean != message:
            if record.name == "uvicorn.access" and isinstance(record.args, tuple):  # its formatter reads the arguments
                record.args = tuple(self._clean(each) if isinstance(each, str) else each for each in record.args)
            else:
                record.msg, record.args = clean, None
                vars(record).pop("color_message", None)  # uvicorn's formatter would prefer it
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        for name, value in list(vars(record).items()):
            if isinstance(value, str) and name not in _OWN:
                setattr(record, name, self._clean(value))
        return True

    def _clean(self, text: str) -> str:
        return redacted(text, self._values)


def redact_handlers(names: Iterable[str], values: Iterable[str] = ()) -> None:
    """Redact all lines that the handlers of these loggers write, and the lines of programs without handlers.

    Args:
        names: Loggers; the empty name is the root.
        values: Secrets to hide wherever they stand.
    """
    handlers = {handler for name in names for handler in logging.getLogger(name).handlers}
    if logging.lastResort is not None:
        handlers.add(logging.lastResort)
    for handler in handlers:
        if not any(isinstance(each, RedactSecrets) for each in handler.filters):
            handler.addFilter(RedactSecrets(values))
