"""Options of a model's endpoint, for the commands that let a model act: `rollouts run` and `play`."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from openenv import settings

from .command import OldName, check_choice
from .options import flags_class

if TYPE_CHECKING:
    from openenv.rollout.tasks.task import Model


# A copy of the names in `openenv.rollout`, because showing help must not load it; tests compare both.
DIALECTS = ("openai_chat", "openai_responses", "anthropic")


def _checked_dialect(name: str | None) -> str | None:
    check_choice("--dialect", name, DIALECTS)
    return name


@flags_class
class ModelFlags:
    """Options of the model's endpoint."""

    llm_url: Annotated[
        str | None,
        typer.Option("--llm-url", OldName("--base-url"), metavar="URL", help="The model's endpoint, ending in /v1."),
    ] = None
    model: Annotated[str | None, typer.Option(metavar="MODEL", help="The model's ID at that endpoint.")] = None
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            help="The endpoint's key. Prefer OPENENV_MODEL_KEY: other users of this machine can read options.",
        ),
    ] = None
    dialect: Annotated[
        str | None,
        typer.Option(
            "--dialect",
            metavar="API",
            callback=_checked_dialect,
            help=f"The endpoint's API: {', '.join(DIALECTS)}; by default anthropic at api.anthropic.com, "
            "else openai_chat.",
        ),
    ] = None
    sampling: Annotated[
        str | None,
        typer.Option(metavar="JSON", help='Sampling parameters, instead of the agent\'s: {"temperature": 1.0}.'),
    ] = None

    def endpoint(self) -> Model | None:
        """Return the model, or None if the options name none.

        Raises:
            ValueError: The options do not fit together.
        """
        from pydantic import ValidationError

        from openenv.rollout.tasks.task import Model

        # Agents such as noop need no model, so neither option is an error.
        if self.llm_url is None and self.model is None:
            return None
        if self.llm_url is None or self.model is None:
            raise ValueError("--llm-url and --model go together")
        fields: dict[str, object] = {"base_url": self.llm_url, "name": self.model}
        is_anthropic = urlsplit(self.llm_url).hostname == "api.anthropic.com"
        fields["dialect"] = self.dialect or ("anthropic" if is_anthropic else "openai_chat")
        # Without a key, `Model` has a placeholder, which endpoints without authentication ignore.
        api_key = self.api_key or settings.model_key()
        if api_key is not None:
            fields["api_key"] = api_key
        if self.sampling is not None:
            try:
                # Parsed here, so that a shell-quoting mistake is reported with its position.
                fields["sampling"] = json.loads(self.sampling)
            except ValueError as exc:
                raise ValueError(f"--sampling is not JSON: {exc}") from None
        try:
            return Model.model_validate(fields)
        except ValidationError as exc:
            # Without the input, which the error's own text repeats: it contains the key.
            raise ValueError("; ".join(str(error["msg"]) for error in exc.errors())) from None
