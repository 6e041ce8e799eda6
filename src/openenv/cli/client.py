"""`openenv client`: write a module with the models of a running server and a typed client.

A server's schema becomes source code here, so names contain only letters and digits, and every text is quoted.
"""

from __future__ import annotations

import io
import keyword
import math
import textwrap
import tokenize
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from openenv.errors import OpenEnvError

from .command import failure

if TYPE_CHECKING:
    from openenv.client.schema_models import FieldSpec, ModelSpec, SchemaModels, TypeSpec

# In the first line of a written file; without --force only files with it are replaced.
_MARK = "Written by `openenv client`"
# Columns of the written source, the default of common formatters.
_WIDTH = 88
_INDENT = "    "
# The names that a module may need, by the module to import them from.
_EXPORTS = {
    "typing": ("Annotated", "Any", "Literal"),
    "numpy.typing": ("NDArray",),
    "openenv": ("Action", "EnvClient", "Observation", "State"),
    "pydantic": ("BaseModel", "ConfigDict", "Field"),
}


# From a schema to source code:
#
#   server ──/metadata──> name of the environment
#          ──/schema────> JSON Schema ──read_models──> ModelSpec, FieldSpec ──> maze_client.py
def client(
    url: str = typer.Argument(..., metavar="URL", help="The running server."),
    output: Path | None = typer.Option(
        None,
        "--output",
        "-o",
        metavar="FILE",
        help="Where to write it, - for standard output; by default NAME_client.py.",
    ),
    name: str | None = typer.Option(
        None, "--name", metavar="NAME", help="The client's class; by default made from the environment's name."
    ),
    token: str | None = typer.Option(None, metavar="TOKEN", help="The server's token; by default OPENENV_TOKEN."),
    force: bool = typer.Option(False, "--force", help="Replace a file that this command did not write."),
) -> None:
    """Write a typed client for a running server: its models as pydantic classes, and a client class.

      openenv client http://localhost:8000
      openenv client http://localhost:8000 -o robot.py --name RobotEnv

    Then:

      from robot import Move, RobotEnv
      with RobotEnv("http://localhost:8000").sync() as env:
          env.reset()
          env.step(Move(to=3))

    The module needs openenv and pydantic, but not the environment's code. It passes mypy --strict.
    """
    from openenv.client.network import ConnectionOptions, with_token  # other commands need no client
    from openenv.client.schema_client import ask
    from openenv.client.schema_models import SchemaUnreadable, build_types, class_name, read_models

    options = ConnectionOptions(headers=with_token(None, token))
    try:
        described = ask(url, "/metadata", options)
        models = read_models(ask(url, "/schema", options))
        build_types(models)  # a module that cannot be imported is not written
    except (OpenEnvError, SchemaUnreadable, ValueError) as exc:
        raise failure(exc) from None
    title = str(described.get("name") or "environment")
    # maze_env, MazeEnv and MazeEnvironment all become MazeEnv; an environment called `_env` keeps its name.
    stem = title.removesuffix("_env").removesuffix("Env").removesuffix("Environment") or title
    if name is not None and (not name.isidentifier() or keyword.iskeyword(name)):
        raise typer.BadParameter(f"{name!r} is not a class name", param_hint="--name")
    chosen = name or f"{class_name(stem)}Env"
    while chosen in models.models or chosen == "EnvClient":
        chosen = f"{chosen}Client"
    text = module_source(models, chosen, title)
    if output is not None and str(output) == "-":
        typer.echo(text, nl=False)
        return
    path = output or Path(f"{_snake(class_name(stem))}_client.py")
    if path.exists() and not force and _MARK not in path.read_text(encoding="utf-8", errors="replace"):
        raise failure(f"{path} exists and was not written by this command; choose another with -o, or use --force")
    try:
        path.write_text(text, encoding="utf-8", newline="\n")
    except OSError as exc:
        raise failure(f"{path} cannot be written: {exc.strerror or exc}") from None
    typer.echo(f"Wrote {path}: {', '.join([*models.models, chosen])}")


def module_source(models: SchemaModels, client_name: str, title: str) -> str:
    """Return the text of a module with the models and a client class.

    Args:
        models: The models.
        client_name: Of the client class.
        title: The environment's name, for texts.
    """
    classes = [_class_source(model) for model in models.models.values()]
    # The written module:
    #
    #   """Written by `openenv client` for maze_env: changes are lost."""
    #
    #   from __future__ import annotations
    #
    #   from openenv import Action, EnvClient, Observation, State
    #
    #   class Move(Action):
    #       to: int
    #
    #   class MazeEnv(EnvClient[Move, View, State]):
    #       """Steps a served maze_env environment."""
    parameters = ", ".join(_root(spec) for spec in (models.action, models.observation, models.state))
    head = f"class {client_name}(EnvClient[{parameters}]):"
    # Broken in the way of formatters: first the bases in a line, then one parameter per line.
    if len(head) > _WIDTH:
        inner = f"EnvClient[{parameters}]"
        if len(inner) + 4 > _WIDTH:
            parts = "".join(
                f"{_INDENT * 2}{_root(spec)},\n" for spec in (models.action, models.observation, models.state)
            )
            inner = f"EnvClient[\n{parts}{_INDENT}]"
        head = f"class {client_name}(\n{_INDENT}{inner}\n):"
    classes.append(f"{head}\n{_docstring(f'Steps a served {title} environment.')}\n")
    body = "\n\n".join(classes)
    return f"{_docstring(f'{_MARK} for {title}: changes are lost.', indent='')}\n\n{_imports(body)}\n\n{body}"


def _imports(body: str) -> str:
    """Return a module's imports, sorted as linters expect."""
    # Imports follow from the body: `np` in a docstring must not import numpy.
    tokens = tokenize.generate_tokens(io.StringIO(body).readline)
    names = {token.string for token in tokens if token.type == tokenize.NAME}  # names in texts do not count
    standard = [f"import {module}" for module in ("datetime", "uuid") if module in names]
    others = ["import numpy as np"] if "np" in names else []
    for module, exports in _EXPORTS.items():
        if used := [name for name in exports if name in names]:
            (standard if module == "typing" else others).append(f"from {module} import {', '.join(used)}")
    # Three groups with an empty line between: future, standard library, third parties.
    groups = [["from __future__ import annotations"], standard, others]
    return "\n\n".join("\n".join(group) for group in groups if group) + "\n"


def _class_source(model: ModelSpec) -> str:
    lines = [f"class {model.name}({model.base or 'BaseModel'}):"]
    if model.description:
        lines += [_docstring(model.description), ""]
    if config := _config(model):
        lines += [_call(f"{_INDENT}model_config = ConfigDict", config), ""]
    lines += [_field_source(field) for field in model.fields]
    if len(lines) == 1:
        lines.append(f"{_INDENT}pass")
    return "\n".join(lines).rstrip("\n") + "\n"


def _config(model: ModelSpec) -> list[str]:
    config = []
    # Action and Observation forbid unknown fields, other base classes do not. Only the difference is written.
    forbids = model.base in ("Action", "Observation")
    if model.allows_extra and forbids:
        config.append('extra="allow"')
    elif not model.allows_extra and not forbids:
        config.append('extra="forbid"')
    if model.base is None and any(_holds(field.type, "array") for field in model.fields):
        config.append("arbitrary_types_allowed=True")
    if model.base != "Observation" and any(_holds(field.type, "bytes") for field in model.fields):
        config.append('ser_json_bytes="base64"')
    if model.has_other_names:
        config += ["validate_by_name=True", "validate_by_alias=True", "serialize_by_alias=True"]
    return config


def _holds(spec: TypeSpec, kind: str) -> bool:
    return spec.kind == kind or (kind == "bytes" and spec.python is bytes) or any(_holds(p, kind) for p in spec.parts)


def _field_source(field: FieldSpec) -> str:
    options: list[str] = []
    # The order in `Field(...)`: default, limits, alias, description.
    if field.makes_empty:
        options.append(f"default_factory={field.type.kind}")
    elif not field.is_required:
        options.append(_default(field.default))
    options += [f"{name}={_value(value)}" for name, value in field.type.limits]
    if field.is_unknown:
        options.append("exclude_if=lambda value: value is None")
    if field.name != field.wire:
        options.append(f"alias={_value(field.wire)}")
    if field.description:
        options.append(f"description={_value(field.description)}")
    kind = _type(field.type, with_limits=False)
    head = f"{_INDENT}{field.name}: {kind}"
    if not options:
        return _fitting(head, field)
    # `steps: int = 0` instead of `steps: int = Field(default=0)`.
    if len(options) == 1 and options[0].startswith("default="):
        return _fitting(f"{head} = {options[0].removeprefix('default=')}", field)
    return _call(f"{head} = Field", options)


def _call(function: str, arguments: list[str]) -> str:
    """Return a call on one line; if too long, with all arguments on the next line, or with one argument per line."""
    # Three forms, the first that fits:
    #
    #   to: int = Field(ge=0, le=3)
    #
    #   to: int = Field(
    #       ge=0, le=3, description="..."
    #   )
    #
    #   to: int = Field(
    #       ge=0,
    #       le=3,
    #   )
    line = f"{function}({', '.join(arguments)})"
    if len(line) <= _WIDTH:
        return line
    if len(inner := f"{_INDENT * 2}{', '.join(arguments)}") <= _WIDTH:
        return f"{function}(\n{inner}\n{_INDENT})"
    return f"{function}(\n" + "".join(f"{_long(one)},\n" for one in arguments) + f"{_INDENT})"


def _fitting(line: str, field: FieldSpec) -> str:
    """Return a line; if it is too long, with one choice per line."""
    if len(line) <= _WIDTH or field.type.kind != "literal":
        return line
    choices = ",\n".join(f"{_INDENT * 2}{_value(one)}" for one in field.type.values)
    # The text behind the type: `Literal["up", "down"] = "up"`.
    default = line.partition("] = ")[2]
    tail = f" = {default}" if default else ""
    return f"{_INDENT}{field.name}: Literal[\n{choices},\n{_INDENT}]{tail}"


def _long(option: str) -> str:
    """Return an argument on one line; a long text on several."""
    line = f"{_INDENT * 2}{option}"
    name, _, value = option.partition("=")
    # Plus 1 for the comma.
    if len(line) + 1 <= _WIDTH or name != "description":
        return line
    room = _WIDTH - 3 * len(_INDENT) - 2
    quote, text = value[0], value[1:-1]
    pieces = textwrap.wrap(text, room, drop_whitespace=False, break_long_words=False, break_on_hyphens=False)
    if any("\\" in piece for piece in pieces):  # an escape must not be cut in two
        return line
    lines = "\n".join(f"{_INDENT * 3}{quote}{piece}{quote}" for piece in pieces)
    return f"{_INDENT * 2}description=(\n{lines}\n{_INDENT * 2})"


def _default(value: Any) -> str:
    # A mutable default needs a factory.
    if value in ([], {}) and isinstance(value, (list, dict)):
        return f"default_factory={type(value).__name__}"
    return f"default_factory=lambda: {_value(value)}" if isinstance(value, (list, dict)) else f"default={_value(value)}"


def _root(spec: TypeSpec) -> str:
    return "dict[str, Any]" if spec.kind == "any" else _type(spec)


def _type(spec: TypeSpec, *, with_limits: bool = True) -> str:
    """Return the source of a type."""
    parts = [_type(part) for part in spec.parts]
    if spec.kind == "plain":
        assert spec.python is not None
        module = "" if spec.python.__module__ == "builtins" else f"{spec.python.__module__}."
        # datetime.datetime is written with its module, str without.
        text = "None" if spec.python is type(None) else f"{module}{spec.python.__name__}"
    elif spec.kind == "union":
        text = " | ".join(parts)
    elif spec.kind in ("list", "tuple"):
        text = f"{spec.kind}[{', '.join(parts)}]"
    elif spec.kind == "dict":
        text = f"dict[str, {parts[0]}]"
    elif spec.kind == "literal":
        text = f"Literal[{', '.join(map(_value, spec.values))}]"
    elif spec.kind == "array":
        text = f"NDArray[np.{spec.dtype}]" if spec.dtype else "NDArray[Any]"
    else:
        text = spec.name if spec.kind == "model" else "Any"
    if spec.limits and with_limits:
        limits = ", ".join(f"{name}={_value(value)}" for name, value in spec.limits)
        return f"Annotated[{text}, Field({limits})]"
    return text


def _value(value: Any) -> str:
    """Return the source of a JSON value."""
    if isinstance(value, str):
        # The quote that needs fewer escapes, as formatters choose it.
        quote = "'" if value.count('"') > value.count("'") else '"'
        return quote + "".join(_escaped(character, quote) for character in value) + quote
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_value(key)}: {_value(one)}" for key, one in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return f'float("{value}")'
    return repr(value)


def _escaped(character: str, quote: str) -> str:
    if character in ("\\", quote):
        return f"\\{character}"
    return character if character.isprintable() else character.encode("unicode_escape").decode()


def _docstring(text: str, indent: str = _INDENT) -> str:
    """Return a docstring in short lines, without quotes, backslashes and control characters."""
    # A docstring from a server must not end early: `"""` and a backslash at its end are replaced.
    plain = "".join(one if one.isprintable() else " " for one in text.replace("\\", "/").replace('"', "'"))
    lines = textwrap.wrap(" ".join(plain.split()), _WIDTH - len(indent) - 3) or [""]
    if len(lines) == 1 and len(lines[0]) + 6 + len(indent) <= _WIDTH:
        return f'{indent}"""{lines[0]}"""'
    rest = "".join(f"{indent}{line}\n" for line in lines[1:])
    return f'{indent}"""{lines[0]}\n{rest}{indent}"""'


def _snake(name: str) -> str:
    """Return `MazeRun` as `maze_run`."""
    parts = "".join(f"_{one.lower()}" if one.isupper() else one for one in name)
    return parts.strip("_") or "environment"
