"""Environment variables: the one place that reads `os.environ` (documented in docs/reference/settings.md)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

T = TypeVar("T")

_TRUE = frozenset({"true", "1", "yes"})
_FALSE = frozenset({"false", "0", "no"})


def _environ(environ: Mapping[str, str] | None) -> Mapping[str, str]:
    return os.environ if environ is None else environ


def _text(name: str, environ: Mapping[str, str] | None) -> str:
    return _environ(environ).get(name, "").strip()


@dataclass(frozen=True, slots=True)
class Setting(Generic[T]):
    """A variable; call it to have its value, or None when it is not set.

    Args:
        name: The variable.
        parse: Makes a value of its text; raises ValueError for a text that is no number.
    """

    name: str
    parse: Callable[[str], T]

    def __call__(self, environ: Mapping[str, str] | None = None) -> T | None:
        """Read the variable.

        Raises:
            ValueError: Its text is no value.
        """
        text = _text(self.name, environ)
        try:
            return self.parse(text) if text else None
        except ValueError:
            raise ValueError(f"{self.name} must be a number, not {text!r}") from None


# -- servers --------------------------------------------------------------------------------------------------------

readme_path = Setting("ENV_README_PATH", Path)
"""The README that the web page shows."""
space_id = Setting("SPACE_ID", str)
"""The name of the Hugging Face Space that this runs in."""
space_host = Setting("SPACE_HOST", str)
"""The host name of that Space."""
workers = Setting("OPENENV_WORKERS", str.lower)
"""How many processes `openenv serve` starts: a number, or `auto` for one per core."""
runner_name = Setting("OPENENV_RUNNER", str.lower)
"""`auto`, `thread`, `inline` or `process`."""
env_processes = Setting("OPENENV_ENV_PROCESSES", int)
"""Over how many processes sessions are spread."""
sessions_per_process = Setting("OPENENV_SESSIONS_PER_PROCESS", int)
"""How many sessions a process may hold."""
max_sessions = Setting("OPENENV_MAX_SESSIONS", int)
"""How many sessions a server may hold."""
max_agent_sessions = Setting("OPENENV_MAX_AGENT_SESSIONS", int)
"""How many sessions agents may open at once; by default all but one."""
session_timeout = Setting("OPENENV_SESSION_TIMEOUT", float)
"""How many seconds an unused session is kept."""
session_grace = Setting("OPENENV_SESSION_GRACE", float)
"""How many seconds a session is kept without a connection."""
close_timeout = Setting("OPENENV_CLOSE_TIMEOUT", float)
"""How many seconds the `close` of an environment may take."""
drain_timeout = Setting("OPENENV_DRAIN_TIMEOUT", float)
"""How many seconds sessions may go on after SIGTERM."""
max_message_mb = Setting("OPENENV_MAX_MESSAGE_MB", float)
"""The largest request that a server reads."""
max_batch = Setting("OPENENV_MAX_BATCH", int)
"""How many requests one batch may hold."""
max_unread_mb = Setting("OPENENV_MAX_UNREAD_MB", float)
"""How much the clients of a server may leave unread, all together."""
record = Setting("OPENENV_RECORD", str.lower)
"""Whose episodes a server writes to disk: `page`, `all` or `off`."""
episodes = Setting("OPENENV_EPISODES", Path)
"""The folder of recorded episodes."""
record_episodes = Setting("OPENENV_RECORD_EPISODES", int)
"""How many recorded episodes are kept."""
record_mb = Setting("OPENENV_RECORD_MB", float)
"""How much disk the recorded episodes may take."""
log_format = Setting("OPENENV_LOG_FORMAT", str.lower)
"""`text` or `json`."""


def web_interface_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether `ENABLE_WEB_INTERFACE` asks for the web page."""
    return _text("ENABLE_WEB_INTERFACE", environ).lower() in _TRUE


def web_interface_setting(environ: Mapping[str, str] | None = None) -> bool | None:
    """Return what `ENABLE_WEB_INTERFACE` says of the web page, or None when it is not set."""
    return web_interface_enabled(environ) if _text("ENABLE_WEB_INTERFACE", environ) else None


def server_mode(environ: Mapping[str, str] | None = None) -> str:
    """Return `OPENENV_MODE`, by default `simulation`."""
    return _text("OPENENV_MODE", environ) or "simulation"


def fast_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether servers use `openenv.server.fast`; `OPENENV_FAST=0` leaves everything to uvicorn."""
    return _text("OPENENV_FAST", environ).lower() not in _FALSE


def redact_errors(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether `OPENENV_REDACT_ERRORS` keeps the texts of exceptions from clients."""
    return _text("OPENENV_REDACT_ERRORS", environ).lower() in _TRUE


def allowed_origins(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the origins in `OPENENV_ALLOWED_ORIGINS`, which is separated by commas."""
    return frozenset(_listed("OPENENV_ALLOWED_ORIGINS", environ))


def orchestrator_tokens(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the tokens in `OPENENV_TOKEN`, which may do everything."""
    return _tokens("OPENENV_TOKEN", environ)


def agent_tokens(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the tokens in `OPENENV_AGENT_TOKEN`, which may call tools."""
    return _tokens("OPENENV_AGENT_TOKEN", environ)


def observer_tokens(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the tokens in `OPENENV_OBSERVER_TOKEN`, which may look."""
    return _tokens("OPENENV_OBSERVER_TOKEN", environ)


def _tokens(name: str, environ: Mapping[str, str] | None) -> tuple[str, ...]:
    tokens = _listed(name, environ)
    if not tokens and _text(name, environ):  # never mistake this for "no token is required"
        raise ValueError(f"{name} is set, but there is no token in it")
    return tokens


def _listed(name: str, environ: Mapping[str, str] | None) -> tuple[str, ...]:
    return tuple(part.strip() for part in _text(name, environ).split(",") if part.strip())


# -- clients --------------------------------------------------------------------------------------------------------


def client_mode(environ: Mapping[str, str] | None = None) -> str:
    """Return `OPENENV_CLIENT_MODE`, by default `simulation`."""
    return _text("OPENENV_CLIENT_MODE", environ) or "simulation"


def client_token(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the token that clients send: `OPENENV_TOKEN`, the first where there are several."""
    return next(iter(_tokens("OPENENV_TOKEN", environ)), None)


# -- clusters -------------------------------------------------------------------------------------------------------

kubeconfig = Setting("KUBECONFIG", str)
"""The file that names Kubernetes clusters, as `kubectl` reads it."""
kubernetes_service_host = Setting("KUBERNETES_SERVICE_HOST", str)
"""Set by Kubernetes in every container: the address of its API."""

# -- clouds ---------------------------------------------------------------------------------------------------------

daytona_api_key = Setting("DAYTONA_API_KEY", str)
"""The key of Daytona."""
novita_api_key = Setting("NOVITA_API_KEY", str)
"""The key of Novita."""
novita_domain = Setting("NOVITA_DOMAIN", str)
"""The region of Novita."""
azure_subscription_id = Setting("AZURE_SUBSCRIPTION_ID", str)
"""The subscription of Azure Container Apps sandboxes."""
azure_resource_group = Setting("AZURE_RESOURCE_GROUP", str)
"""Their resource group."""
azure_sandbox_group = Setting("AZURE_SANDBOX_GROUP", str)
"""Their sandbox group."""
azure_region = Setting("AZURE_REGION", str)
"""Their region."""

# -- rollouts and sandboxes -----------------------------------------------------------------------------------------


def allow_raw_logprobs(environ: Mapping[str, str] | None = None) -> bool:
    """Say whether log-probabilities from before temperature count as ones to train on."""
    return _text("OPENENV_ALLOW_RAW_LOGPROBS", environ).lower() in _TRUE


capture_admin_key = Setting("OPENENV_CAPTURE_ADMIN_KEY", str)
"""Opens the control routes of the capture proxy."""
llm_api_key = Setting("OPENENV_LLM_API_KEY", str)
"""The key of the endpoint behind a capture server of the published interface."""
model_key = Setting("OPENENV_MODEL_KEY", str)
"""The key of the model endpoint that rollouts are run with."""
openai_api_key = Setting("OPENAI_API_KEY", str)
"""The key of OpenAI, and of endpoints that speak its dialect."""
anthropic_api_key = Setting("ANTHROPIC_API_KEY", str)
"""The key of Anthropic."""
any_api_key = Setting("API_KEY", str)
"""The key of a model's provider whose own variable is not set."""
llm_model = Setting("OPENENV_MODEL", str)
"""The model at that endpoint."""
env_file = Setting("OPENENV_ENV_FILE", Path)
"""The file of variables that `openenv harbor` reads where none is named."""
harbor_trials = Setting("OPENENV_HARBOR_TRIALS_DIR", Path)
"""Where rollouts of Harbor's tasks are stored."""
sandbox_name = Setting("OPENENV_SANDBOX", str)
"""The backend for rollouts that name none."""
sandbox_image = Setting("OPENENV_SANDBOX_IMAGE", str)
"""The image of container sandboxes."""
e2b_api_key = Setting("E2B_API_KEY", str)
"""The key of E2B."""


def harbor_datasets(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the datasets of Harbor's tasks in `OPENENV_DATASETS`, with commas between them."""
    return _listed("OPENENV_DATASETS", environ)


def harbor_sandboxes(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the backends in `OPENENV_SANDBOXES` that `openenv harbor info` looks at."""
    return _listed("OPENENV_SANDBOXES", environ)


def sandbox_uids(environ: Mapping[str, str] | None = None) -> range | None:
    """Return the user numbers in `OPENENV_SANDBOX_UIDS`, such as `70000-99999`, of which each local sandbox gets one.

    Raises:
        ValueError: It is no such range.
    """
    text = _text("OPENENV_SANDBOX_UIDS", environ)
    if not text:
        return None
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        raise ValueError(f"OPENENV_SANDBOX_UIDS must be two numbers above 0, such as 70000-99999, not {text!r}")
    return range(int(first), int(last) + 1)


def secret(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the variable that a configuration names as the place of a key.

    Raises:
        ValueError: It is not set.
    """
    value = _text(name, environ)
    if not value:
        raise ValueError(f"{name} is not set")
    return value


# -- folders, child processes ---------------------------------------------------------------------------------------


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder for what is fetched once: `OPENENV_CACHE`, or `openenv` in the user's cache folder."""
    path = _text("OPENENV_CACHE", environ)
    return Path(path).expanduser() if path else _user_folder("XDG_CACHE_HOME", ".cache", environ) / "openenv"


def dataset_cache(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of downloaded datasets: `OPENENV_DATASET_CACHE`, or `harbor-datasets` in the cache folder."""
    path = _text("OPENENV_DATASET_CACHE", environ)
    return Path(path).expanduser() if path else cache_dir(environ) / "harbor-datasets"


def trust_remote_code(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether environments of the Hub are installed without a question: `OPENENV_TRUST_REMOTE_CODE`."""
    return _text("OPENENV_TRUST_REMOTE_CODE", environ).lower() in _TRUE


def rollout_store(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of stored rollouts: `OPENENV_ROLLOUTS`, or `openenv/rollouts` in the user's data folder."""
    path = _text("OPENENV_ROLLOUTS", environ)
    return (
        Path(path).expanduser() if path else _user_folder("XDG_DATA_HOME", ".local/share", environ) / "openenv/rollouts"
    )


def episode_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder that has one of recorded episodes for each environment, in the user's data folder."""
    return _user_folder("XDG_DATA_HOME", ".local/share", environ) / "openenv/episodes"


def _user_folder(name: str, default: str, environ: Mapping[str, str] | None) -> Path:
    path = _text(name, environ)
    return Path(path) if path.startswith("/") else Path(_environ(environ).get("HOME") or Path.home()) / default


def completion_words(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the words after the program's name on a command line that a shell completes; none otherwise.

    Typer sets these variables in the scripts that it installs: bash the first of them, zsh and fish the other.
    """
    if not _text("_OPENENV_COMPLETE", environ):
        return []
    return (_text("COMP_WORDS", environ) or _text("_TYPER_COMPLETE_ARGS", environ)).split()[1:]


def export(values: Mapping[str, object | None]) -> None:
    """Set variables for child processes; None leaves a variable as it is."""
    for name, value in values.items():
        if value is not None:
            os.environ[name] = str(value)


_EXPORTED = threading.Lock()


@contextlib.contextmanager
def exported(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for a block, and put them back; one block at a time, for the environment is the whole process's."""
    with _EXPORTED:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def read_file(path: Path) -> dict[str, str]:
    """Return the variables of a file with lines `NAME=value`.

    Raises:
        OSError: it cannot be read.
    """
    values = {}
    for line in path.read_text("utf-8", "replace").splitlines():
        name, is_set, value = line.strip().removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if is_set and name.isidentifier():
            is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
            values[name] = value[1:-1] if is_quoted else value
    return values


def export_file(path: Path) -> list[str]:
    """Set the variables of a file, but for those that are set; return the names that were not.

    Raises:
        OSError: it cannot be read.
    """
    missing = {name: value for name, value in read_file(path).items() if name not in os.environ}
    os.environ.update(missing)
    return list(missing)


def child_environment(
    extra: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what a child process gets: this process's variables, and more."""
    return {**_environ(environ), **(extra or {})}


def untrusted_environment(
    extra: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return what an agent's process gets: this process's variables without the server's own secrets, and more."""
    own = {
        name: value
        for name, value in _environ(environ).items()
        if not (name.startswith("OPENENV_") and name.endswith(("TOKEN", "TOKENS", "KEY")))
    }
    return {**own, **(extra or {})}
