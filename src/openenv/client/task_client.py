"""`TaskClient`: the catalogue of tasks of a served environment (the Task API), split by split."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any, overload
from urllib.parse import quote

import httpx2
from typing_extensions import Self

from openenv.errors import (
    AccessDenied,
    ConnectFailed,
    Forbidden,
    ProtocolError,
    RequestTimeout,
    ServerError,
    message_of,
)
from openenv.protocol.redaction import redacted

from .network import http_url, parse_ws_url, socket_url, with_token

_PAGE = 100


class TaskClient:
    """Reads the tasks of a served environment; a context manager, usable from any thread.

    Args:
        base_url: The server's address.
        name: The environment, of the names in `environments()`; by default the first.
        token: The token that the server requires; by default `OPENENV_TOKEN`. An agent's token is refused, because
            tasks may contain their solutions.
        timeout_s: How long an answer may take.

    Raises:
        ValueError: The address is not valid.
    """

    def __init__(
        self, base_url: str, *, name: str | None = None, token: str | None = None, timeout_s: float = 30.0
    ) -> None:
        self._base = http_url(base_url)
        self._name = name
        is_local = parse_ws_url(socket_url(base_url)).is_local
        self._http = httpx2.Client(
            base_url=self._base, timeout=timeout_s, headers=with_token(None, token), trust_env=not is_local
        )

    def environments(self) -> list[str]:
        """Name the environments that the server has tasks of."""
        names: list[str] = self._ask("GET", "/list_environments")
        return names

    def splits(self) -> list[dict[str, Any]]:
        """Return the splits: `name`, and `type`, which is `train`, `validation` or `test`.

        Raises:
            NotImplementedError: the environment has no catalogue.
        """
        splits: list[dict[str, Any]] = self._ask("GET", self._path("splits"))
        return splits

    def num_tasks(self, split: str) -> int:
        """Count the tasks of a split."""
        return int(self._field("num_tasks", {"split": split}, "num_tasks"))

    def task(self, split: str, index: int) -> Any:
        """Return one task.

        Raises:
            IndexError: there is none of that number.
        """
        return self._field("task", {"split": split, "index": index}, "task")

    def task_range(self, split: str, start: int | None = None, stop: int | None = None) -> list[Any]:
        """Return the tasks from `start` to `stop`, numbered as in a slice."""
        body = {"split": split, "start": start, "stop": stop}
        tasks = self._field("task_range", {key: value for key, value in body.items() if value is not None}, "tasks")
        return list(tasks)

    def tasks(self, split: str) -> list[Any]:
        """Return all tasks of a split at once."""
        return list(self._field("tasks", {"split": split}, "tasks"))

    def split(self, name: str, *, page: int = _PAGE) -> TaskSplit:
        """Return a split as a sequence that reads its tasks on demand, `page` at a time."""
        return TaskSplit(self, name, page=page)

    def close(self) -> None:
        """Hang up."""
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {redacted(self._base)}>"

    def _path(self, what: str) -> str:
        if self._name is None:
            names = self.environments()
            if not names:
                raise ProtocolError(f"{redacted(self._base)} names no environment")
            self._name = names[0]
        return f"/{quote(self._name, safe='')}/{what}"

    def _field(self, what: str, body: dict[str, Any], field: str) -> Any:
        answer = self._ask("POST", self._path(what), body)
        try:
            return answer[field]
        except (KeyError, TypeError):
            raise ProtocolError(f"{redacted(self._base)} has answered {what} without {field!r}") from None

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask, and return the answer.

        Raises:
            ConnectFailed, RequestTimeout, AccessDenied: the server is not there, too slow, or needs another token.
            NotImplementedError: the environment has no such catalogue.
            IndexError: there is no such task.
            ServerError: anything else that it answers with.
        """
        try:
            response = self._http.request(method, path, json=body)
        except httpx2.TimeoutException:
            raise RequestTimeout(f"No answer from {redacted(self._base)}{path} in time") from None
        except httpx2.HTTPError as exc:
            raise ConnectFailed(f"Cannot reach {redacted(self._base)}: {message_of(exc)}") from exc
        try:
            answer = response.json()
        except ValueError:
            answer = None
        if response.status_code < 400 and answer is not None:
            return answer
        detail = answer.get("detail") if isinstance(answer, dict) else None
        text = f"{redacted(self._base)}{path}: {detail or answer or response.status_code}"
        if response.status_code == 501:
            raise NotImplementedError(text)
        if response.status_code == 400:
            raise IndexError(text)
        refusals = {401: AccessDenied, 403: Forbidden}
        raise refusals.get(response.status_code, ServerError)(text)


class TaskSplit(Sequence[Any]):
    """The tasks of a split, read page by page. Made by `TaskClient.split`; tasks stay in memory once read."""

    def __init__(self, client: TaskClient, name: str, *, page: int) -> None:
        if page < 1:
            raise ValueError("page must be at least 1")
        self.name = name
        self._client = client
        self._page = page
        self._pages: dict[int, list[Any]] = {}
        self._length: int | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        with self._lock:
            if self._length is None:
                self._length = self._client.num_tasks(self.name)
            return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        places = range(len(self))[index]  # raises IndexError, as a list does
        if isinstance(places, range):
            return [self[place] for place in places]
        number, offset = divmod(places, self._page)
        with self._lock:
            if number not in self._pages:
                start = number * self._page
                self._pages[number] = self._client.task_range(self.name, start, start + self._page)
            return self._pages[number][offset]

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
