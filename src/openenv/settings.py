"""Environment variables: the one place that reads `os.environ` (documented in docs/reference/settings.md)."""

from __future__ import annotations

import contextlib
import os
import re
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
    """A variable; call it to get its value, or None if it is not set.

    `scripts/reference.py` writes the documentation from these fields.

    Args:
        name: The variable.
        parse: Converts its text; raises ValueError for a text that is not a number.
        readers: The programs that read it, for the documentation.
        meaning: A short description, for the documentation; without one, the variable is not listed.
        default: The behaviour without the variable, for the documentation.
    """

    name: str
    parse: Callable[[str], T]
    readers: str = ""
    meaning: str = ""
    default: str = "none"

    def __call__(self, environ: Mapping[str, str] | None = None) -> T | None:
        """Read the variable.

        Raises:
            ValueError: Its text has the wrong form.
        """
        text = _text(self.name, environ)
        try:
            return self.parse(text) if text else None
        except ValueError:
            raise ValueError(f"{self.name} must be a number, not {text!r}") from None


def _is_true(text: str) -> bool:
    return text.lower() in _TRUE


def _items(text: str) -> tuple[str, ...]:
    """Return the parts of a list with commas."""
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _folder(text: str) -> Path:
    return Path(text).expanduser()


# -- servers --------------------------------------------------------------------------------------------------------

readme_path = Setting(
    "ENV_README_PATH",
    Path,
    "the web page",
    "the README to show; wins over `envs/NAME`, the environment's folder and `/app`",
    "not set",
)
space_id = Setting(
    "SPACE_ID",
    str,
    "the web page",
    "set by Hugging Face Spaces: the Space's name, in the quick start of custom pages",
    "not set",
)
space_host = Setting(
    "SPACE_HOST",
    str,
    "the web page",
    "set by Hugging Face Spaces: the address in the quick start, and the sites that may frame the page",
    "not set",
)
workers = Setting(
    "OPENENV_WORKERS",
    str.lower,
    "`openenv serve`",
    "number of [server processes](../howto/serve.md#use-all-cores) that share the port, or `auto` for one per core",
    "1",
)
heartbeat_timeout = Setting(
    "OPENENV_HEARTBEAT_TIMEOUT",
    float,
    "`openenv serve`",
    "seconds after which a silent [worker](../howto/serve.md#hung-workers) gets no new sessions",
    "2.5",
)
replace_timeout = Setting(
    "OPENENV_REPLACE_TIMEOUT",
    float,
    "`openenv serve`",
    "seconds after which a silent worker is killed and replaced; 0 for never",
    "5",
)
runner_name = Setting("OPENENV_RUNNER", str.lower, "servers", "`auto`, `thread`, `inline` or `process`", "`auto`")
env_processes = Setting(
    "OPENENV_ENV_PROCESSES",
    int,
    "servers",
    "number of [processes](../howto/processes.md) for sessions, with the runner `process`",
    "one per core",
)
sessions_per_process = Setting(
    "OPENENV_SESSIONS_PER_PROCESS", int, "servers", "maximum sessions of one such process", "unlimited"
)
max_sessions = Setting("OPENENV_MAX_SESSIONS", int, "servers", "maximum number of sessions", "1")
max_agent_sessions = Setting(
    "OPENENV_MAX_AGENT_SESSIONS", int, "servers", "maximum number of sessions that agents open", "all but one"
)
session_timeout = Setting(
    "OPENENV_SESSION_TIMEOUT", float, "servers", "seconds until an unused HTTP or MCP session ends", "900"
)
session_grace = Setting(
    "OPENENV_SESSION_GRACE",
    float,
    "servers",
    "seconds that a session waits for a client that lost its connection",
    "60",
)
close_timeout = Setting(
    "OPENENV_CLOSE_TIMEOUT",
    float,
    "servers",
    "time limit of an environment's `close` in seconds; then its [slot becomes "
    "free](../topics/sessions.md#hanging-environments)",
    "30",
)
drain_timeout = Setting(
    "OPENENV_DRAIN_TIMEOUT",
    float,
    "servers",
    "seconds that [sessions may continue](../howto/observe.md#health-checks) after SIGTERM, while new ones are refused",
    "0: only running calls finish",
)
max_message_mb = Setting("OPENENV_MAX_MESSAGE_MB", float, "servers", "largest accepted request in megabytes", "100")
max_batch = Setting("OPENENV_MAX_BATCH", int, "servers", "maximum requests in one batch", "10000")
max_unread_mb = Setting(
    "OPENENV_MAX_UNREAD_MB", float, "servers", "maximum unread data of all clients together, in megabytes", "1024"
)
record = Setting(
    "OPENENV_RECORD",
    str.lower,
    "servers",
    "[episodes](../howto/web.md#episode-recording) to keep on disk: `page`, `all` or `off`",
    "`page`",
)
episodes = Setting(
    "OPENENV_EPISODES",
    Path,
    "servers",
    "the folder of recorded episodes",
    "`openenv/episodes/NAME` in the user's data folder",
)
record_episodes = Setting("OPENENV_RECORD_EPISODES", int, "servers", "maximum number of recorded episodes", "1000")
record_mb = Setting(
    "OPENENV_RECORD_MB", float, "servers", "maximum disk space of recorded episodes, in megabytes", "256"
)
log_format = Setting("OPENENV_LOG_FORMAT", str.lower, "`openenv serve`", "`text` or `json`", "`text`")


_web_interface = Setting(
    "ENABLE_WEB_INTERFACE",
    _is_true,
    "`create_app`, `openenv serve`",
    "`true`, `1` or `yes` adds the [web page](../howto/web.md), any other value removes it",
    "off; on with `openenv serve`",
)


def web_interface_setting(environ: Mapping[str, str] | None = None) -> bool | None:
    """Return whether the variable asks for the web page, or None if it is not set."""
    return _web_interface(environ)


def web_interface_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether the variable asks for the web page."""
    return bool(_web_interface(environ))


_mode = Setting("OPENENV_MODE", str, "`create_app`", "`simulation` or `production`", "`simulation`")


def server_mode(environ: Mapping[str, str] | None = None) -> str:
    """Return the server's mode, by default `simulation`."""
    return _mode(environ) or "simulation"


_fast = Setting(
    "OPENENV_FAST",
    str.lower,
    "servers",
    "`0`, `false` or `no` uses uvicorn and plain ASGI instead of `openenv.server.fast`: same behaviour, slower",
    "on",
)


def fast_enabled(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether servers use `openenv.server.fast`."""
    return _fast(environ) not in _FALSE


_redact_errors = Setting(
    "OPENENV_REDACT_ERRORS",
    _is_true,
    "servers",
    "`true`, `1` or `yes` hides the texts of an environment's exceptions from clients",
    "off",
)


def redact_errors(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether to hide the texts of exceptions from clients."""
    return bool(_redact_errors(environ))


_allowed_origins = Setting(
    "OPENENV_ALLOWED_ORIGINS",
    _items,
    "servers",
    "web origins, separated by commas, whose pages may use the server; `*` for all",
    "the server's own",
)


def allowed_origins(environ: Mapping[str, str] | None = None) -> frozenset[str]:
    """Return the other web origins that may use the server."""
    return frozenset(_allowed_origins(environ) or ())


_trusted_proxies = Setting(
    "OPENENV_TRUSTED_PROXIES",
    _items,
    "`openenv gateway`",
    "addresses and networks, separated by commas, of the proxies in front of a "
    "[gateway](../howto/gateway.md#protection) whose `X-Forwarded-For` it believes",
    "none",
)


def trusted_proxies(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the addresses of the proxies that a gateway trusts."""
    return _trusted_proxies(environ) or ()


_orchestrator = Setting(
    "OPENENV_TOKEN",
    _items,
    "servers, clients",
    "tokens, separated by commas, that allow everything; clients send the first one. See [Secure a "
    "server](../howto/secure.md)",
    "none: open",
)


def orchestrator_tokens(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the tokens that allow everything."""
    return _tokens(_orchestrator, environ)


_agent = Setting("OPENENV_AGENT_TOKEN", _items, "servers", "tokens for agents: they can only call tools", "none")


def agent_tokens(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the tokens that can only call tools."""
    return _tokens(_agent, environ)


_observer = Setting("OPENENV_OBSERVER_TOKEN", _items, "servers", "tokens for observers: they can only read", "none")


_observers_see_episodes = Setting(
    "OPENENV_OBSERVER_EPISODES",
    _is_true,
    "servers",
    "`true`, `1` or `yes` lets observers read recorded episodes",
    "off",
)


def observers_see_episodes(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether observers may read recorded episodes."""
    return bool(_observers_see_episodes(environ))


def observer_tokens(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the tokens that can only read."""
    return _tokens(_observer, environ)


def _tokens(setting: Setting[tuple[str, ...]], environ: Mapping[str, str] | None) -> tuple[str, ...]:
    tokens = setting(environ)
    if tokens == ():  # `OPENENV_TOKEN=,` must not open the server
        raise ValueError(f"{setting.name} contains no token: set one, or unset the variable")
    return tokens or ()


_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD)$")


def secret_values(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the values of all variables whose names end like those of secrets, for logs that must not contain them."""
    found = _environ(environ).items()
    # OPENENV_TOKEN may list several tokens.
    return tuple(part.strip() for name, text in found if _SECRET_NAME.search(name) for part in text.split(",") if part)


# -- clients --------------------------------------------------------------------------------------------------------


_client_mode = Setting("OPENENV_CLIENT_MODE", str, "clients", "`simulation` or `production`", "`simulation`")


def client_mode(environ: Mapping[str, str] | None = None) -> str:
    """Return the clients' mode, by default `simulation`."""
    return _client_mode(environ) or "simulation"


def client_token(environ: Mapping[str, str] | None = None) -> str | None:
    """Return the token that clients send: the first of `OPENENV_TOKEN`."""
    return next(iter(orchestrator_tokens(environ)), None)


# -- clusters -------------------------------------------------------------------------------------------------------

kubeconfig = Setting(
    "KUBECONFIG", str, "clusters", "the file that names Kubernetes clusters, as for `kubectl`", "`~/.kube/config`"
)
kubernetes_service_host = Setting(
    "KUBERNETES_SERVICE_HOST",
    str,
    "clusters",
    "set by Kubernetes in every container: the address of its API",
    "not set",
)

# -- clouds ---------------------------------------------------------------------------------------------------------

daytona_api_key = Setting("DAYTONA_API_KEY", str, "[clouds](../howto/clouds.md)", "Daytona's key", "none")
novita_api_key = Setting("NOVITA_API_KEY", str, "clouds", "Novita's key", "none")
novita_domain = Setting("NOVITA_DOMAIN", str, "clouds", "Novita's region", "Novita's own")
azure_subscription_id = Setting(
    "AZURE_SUBSCRIPTION_ID", str, "clouds", "the subscription of Azure Container Apps sandboxes", "none"
)
azure_resource_group = Setting("AZURE_RESOURCE_GROUP", str, "clouds", "their resource group", "none")
azure_sandbox_group = Setting("AZURE_SANDBOX_GROUP", str, "clouds", "their sandbox group", "none")
azure_region = Setting("AZURE_REGION", str, "clouds", "their region", "none")

# -- rollouts and sandboxes -----------------------------------------------------------------------------------------


_raw_logprobs = Setting(
    "OPENENV_ALLOW_RAW_LOGPROBS",
    _is_true,
    "`validate_llm`",
    "`true`, `1` or `yes` accepts log-probabilities from before temperature for training",
    "off",
)


def allow_raw_logprobs(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether log-probabilities from before temperature are accepted for training."""
    return bool(_raw_logprobs(environ))


capture_admin_key = Setting(
    "OPENENV_CAPTURE_ADMIN_KEY",
    str,
    "`python -m openenv.rollout.capture`, `python -m openenv.core.harness.capture.server`",
    "key of the capture proxy's control routes; required to listen on other addresses than loopback",
    "on loopback, created and printed",
)
llm_api_key = Setting(
    "OPENENV_LLM_API_KEY",
    str,
    "`openenv harbor`, `python -m openenv.core.harness.capture.server`",
    "the endpoint's key",
    "none",
)
model_key = Setting("OPENENV_MODEL_KEY", str, "`openenv rollouts run`, `openenv play`", "the endpoint's key", "none")
openai_api_key = Setting(
    "OPENAI_API_KEY", str, "`openenv collect`, LLM clients", "the key of OpenAI, and of endpoints with its API", "none"
)
anthropic_api_key = Setting("ANTHROPIC_API_KEY", str, "`openenv collect`, LLM clients", "Anthropic's key", "none")
any_api_key = Setting(
    "API_KEY", str, "`openenv collect`, LLM clients", "a provider's key, if the provider's variable is not set", "none"
)
llm_model = Setting("OPENENV_MODEL", str, "`openenv harbor`", "the model's ID", "the only one at the endpoint")
env_file = Setting("OPENENV_ENV_FILE", Path, "`openenv harbor`", "a file of variables to set first", "none")
harbor_trials = Setting(
    "OPENENV_HARBOR_TRIALS_DIR",
    Path,
    "`openenv harbor`",
    "the store of rollouts of Harbor's tasks",
    "`OPENENV_ROLLOUTS`",
)
sandbox_name = Setting(
    "OPENENV_SANDBOX",
    str,
    "`envs/opencode_env`",
    "the default sandbox: `local`, `docker`, `e2b` or, for debugging, `process`",
    "`local`",
)
sandbox_image = Setting(
    "OPENENV_SANDBOX_IMAGE",
    str,
    "container sandboxes",
    "the default image; `host` for the host's system",
    "`python:3.12-slim`",
)
e2b_api_key = Setting("E2B_API_KEY", str, "E2B sandboxes", "E2B's key", "none")


_datasets = Setting("OPENENV_DATASETS", _items, "`openenv harbor`", "datasets, separated by commas", "none")


def harbor_datasets(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the datasets that contain Harbor tasks."""
    return _datasets(environ) or ()


_sandboxes = Setting(
    "OPENENV_SANDBOXES",
    _items,
    "`openenv harbor info`",
    "the backends to check, separated by commas",
    "`docker,kubernetes`",
)


def harbor_sandboxes(environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Return the backends that `openenv harbor info` checks."""
    return _sandboxes(environ) or ()


_uids = Setting(
    "OPENENV_SANDBOX_UIDS",
    str,
    "local sandboxes that root starts",
    "user IDs; each sandbox gets one. If two containers of a machine run sandboxes, give them different ranges",
    "`70000-99999`",
)


def sandbox_uids(environ: Mapping[str, str] | None = None) -> range | None:
    """Return the user IDs for local sandboxes, such as `70000-99999`.

    Raises:
        ValueError: The text is not a range of user IDs.
    """
    text = _uids(environ)
    if not text:
        return None
    first, _, last = text.partition("-")
    if not (first.isdigit() and last.isdigit() and 0 < int(first) <= int(last)):
        raise ValueError(f"{_uids.name} must be two numbers above 0, such as 70000-99999, not {text!r}")
    return range(int(first), int(last) + 1)


def secret(name: str, environ: Mapping[str, str] | None = None) -> str:
    """Return the variable that a configuration names for a key.

    Raises:
        ValueError: The variable is not set.
    """
    value = _text(name, environ)
    if not value:
        raise ValueError(f"{name} is not set")
    return value


# -- folders, child processes ---------------------------------------------------------------------------------------


_cache = Setting(
    "OPENENV_CACHE",
    _folder,
    "rollouts, `AutoEnv`",
    "the folder of installed agents, environments of the Hub, and the list of installed environments",
    "`openenv` in the user's cache folder",
)


_validate_checks = Setting(
    "OPENENV_VALIDATE_CHECKS",
    _is_true,
    "rollouts",
    "run the checks of a task on its initial files and its solution before its first agent",
    "1",
)


def validate_checks(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether tasks are validated."""
    return _validate_checks(environ) is not False


def cache_dir(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of downloads: the variable's, or `openenv` in the user's cache folder."""
    return _cache(environ) or _user_folder("XDG_CACHE_HOME", ".cache", environ) / "openenv"


_dataset_cache = Setting(
    "OPENENV_DATASET_CACHE",
    _folder,
    "`openenv harbor`",
    "the folder of downloaded datasets",
    "`harbor-datasets` in `OPENENV_CACHE`",
)


def dataset_cache(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of downloaded datasets: the variable's, or `harbor-datasets` in the cache folder."""
    return _dataset_cache(environ) or cache_dir(environ) / "harbor-datasets"


_trust_remote_code = Setting(
    "OPENENV_TRUST_REMOTE_CODE",
    _is_true,
    "`AutoEnv`, `AutoAction`",
    "`true`, `1` or `yes` installs environments of the Hub without asking",
    "off",
)


def trust_remote_code(environ: Mapping[str, str] | None = None) -> bool:
    """Return whether to install environments of the Hub without asking."""
    return bool(_trust_remote_code(environ))


_rollouts = Setting(
    "OPENENV_ROLLOUTS",
    _folder,
    "`openenv rollouts`, `openenv view`, `envs/opencode_env`",
    "the folder of stored rollouts; if set, `envs/opencode_env` stores and shows its rollouts",
    "`openenv/rollouts` in the user's data folder",
)


def rollout_store(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of stored rollouts: the variable's, or `openenv/rollouts` in the user's data folder."""
    return _rollouts(environ) or _user_folder("XDG_DATA_HOME", ".local/share", environ) / "openenv/rollouts"


def episode_folder(environ: Mapping[str, str] | None = None) -> Path:
    """Return the folder of recorded episodes, with a folder for each environment, in the user's data folder."""
    return _user_folder("XDG_DATA_HOME", ".local/share", environ) / "openenv/episodes"


def _user_folder(name: str, default: str, environ: Mapping[str, str] | None) -> Path:
    path = _text(name, environ)
    return Path(path) if path.startswith("/") else Path(_environ(environ).get("HOME") or Path.home()) / default


def completion_words(environ: Mapping[str, str] | None = None) -> list[str]:
    """Return the words after the program's name while a shell completes a command line; otherwise an empty list.

    Typer's completion scripts set these variables: bash the first, zsh and fish the second.
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
    """Set variables for a block, then restore them; one block at a time, because the whole process shares them."""
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
        OSError: The file cannot be read.
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
    """Set the missing variables of a file; return their names.

    Raises:
        OSError: The file cannot be read.
    """
    missing = {name: value for name, value in read_file(path).items() if name not in os.environ}
    os.environ.update(missing)
    return list(missing)


def child_environment(
    extra: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return a child process's variables: this process's variables and `extra`."""
    return {**_environ(environ), **(extra or {})}


def untrusted_environment(
    extra: Mapping[str, str] | None = None, environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return an agent process's variables: this process's without the server's secrets, and `extra`."""
    own = {
        name: value
        for name, value in _environ(environ).items()
        if not (name.startswith("OPENENV_") and name.endswith(("TOKEN", "TOKENS", "KEY")))
    }
    return {**own, **(extra or {})}
