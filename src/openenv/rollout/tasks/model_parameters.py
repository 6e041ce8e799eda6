"""Which parameters of a model call the agent decides, and which the trainer, for each dialect and engine.

Training data must contain the policy's own samples. So the agent decides the conversation and the tools, and the
trainer decides how answers are sampled: requests keep the parameters in `AGENT_PARAMETERS`, all others are removed. If
a remaining parameter forces or forbids tokens, the turn is excluded from training.

    the agent's request      messages  tools  temperature=0  n_predict=9999   tool_choice="required"
    the endpoint's request   messages  tools                 max_tokens=4096  tool_choice="required"
    in the call's record     removed: temperature, n_predict          not_trainable: "tool_choice: forced tool"

Values only. The names come from the APIs of OpenAI and Anthropic, and from the servers vLLM, SGLang and llama.cpp.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

Dialect = Literal["openai_chat", "openai_responses", "anthropic"]
"""The wire format of a model endpoint."""
AgentDialectName = Literal["openai_chat", "openai_responses", "anthropic", "google"]
"""The wire format of an agent's requests."""
Engine = Literal["vllm", "sglang", "llamacpp", "openai", "anthropic"]
"""The program or service behind a model endpoint."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


AGENT_PARAMETERS: Mapping[AgentDialectName, frozenset[str]] = {
    "openai_chat": _names(
        "model messages tools tool_choice functions function_call parallel_tool_calls stream stream_options max_tokens"
        " max_completion_tokens logprobs top_logprobs return_token_ids reasoning_effort"
    ),
    "openai_responses": _names(
        "model input instructions tools tool_choice parallel_tool_calls stream stream_options max_output_tokens include"
        " top_logprobs reasoning text store previous_response_id conversation"
    ),
    "anthropic": _names(
        "model system messages tools tool_choice stream max_tokens thinking output_config cache_control"
    ),
    "google": _names(
        "model contents systemInstruction system_instruction tools toolConfig tool_config stream generationConfig"
    ),
}
"""The agent's parameters for every engine: the content of the request and the shape of the answer."""
ENGINE_PARAMETERS: Mapping[Engine, frozenset[str]] = {
    "openai": _names("prompt_cache_key prompt_cache_retention safety_identifier user verbosity"),
    "anthropic": _names("metadata"),
}
"""More parameters of the agent if the trainer names the engine: keys of its caches and abuse checks."""
INNER_PARAMETERS: Mapping[str, frozenset[str]] = {
    "stream_options": _names("include_usage include_obfuscation"),
    "reasoning": _names("effort summary generate_summary"),
    "text": _names("verbosity"),  # its `format` is a grammar
    "output_config": _names("effort"),  # likewise
    "thinking": _names("type budget_tokens display"),
    "generationConfig": _names("maxOutputTokens thinkingConfig candidateCount"),
}
"""The agent's fields inside a parameter that is an object."""
CLIENT_TOOLS = (
    "function",
    "custom",
    "namespace",
    "local_shell",
    "apply_patch",
    "computer",
    "bash_",
    "text_editor_",
    "memory_",
)
"""Prefixes of the types of tools that run beside the agent. Others run at the provider: a way out of the sandbox."""
MESSAGE_PARAMETERS = _names("prefix partial tools")
"""Fields of single messages that engines read as parameters: two turn the last message into a prefix of the answer."""
OUTPUT_LIMITS = (
    "max_completion_tokens",
    "max_tokens",
    "max_output_tokens",
    "n_predict",
    "max_new_tokens",
    "max_length",
)
"""Names of the output token limit, by priority."""
OUTPUT_LIMIT: Mapping[AgentDialectName, str] = {
    "openai_chat": "max_tokens",
    "openai_responses": "max_output_tokens",
    "anthropic": "max_tokens",
}
"""The name that every engine of a dialect accepts. Older versions of llama.cpp lack the newer name of chat."""
THINKING_LIMITS = (
    "thinking_token_budget",
    "thinking_budget",
    "thinking_budget_tokens",
    "reasoning_budget",
    "reasoning_budget_tokens",
)
MINIMUM_LIMITS = ("min_tokens", "min_new_tokens")
CHOICES = _names("n n_cmpl best_of use_beam_search num_beams")
"""Parameters that sample several answers. A call is one turn, so neither trainer nor agent can set these."""

_STEERING = {
    "constrained decoding": _names(
        "response_format output_format structured_outputs guided_json guided_regex guided_choice guided_grammar"
        " structural_tag grammar json_schema regex ebnf"
    ),
    "changed probabilities": _names(
        "logit_bias allowed_token_ids bad_words bad_words_ids custom_logit_processor logits_processors custom_params"
        " vllm_xargs ignore_eos watermarking"
    ).union(MINIMUM_LIMITS),
    "forced tokens": _names("reasoning_budget_message").union(THINKING_LIMITS),
    "forced prefix": _names("continue_final_message echo generation_prompt prefill"),
    "hidden prompt": _names("previous_response_id conversation session_params prompt input_ids"),
    "another prompt template": _names("chat_template"),
}
_GRAMMARS = _STEERING["constrained decoding"]
STEERING: Mapping[str, str] = {name: how for how, names in _STEERING.items() for name in names}
"""Parameters that override the policy's choice of tokens, and how. Null and empty values turn them off."""

_COMMON = "temperature top_p seed stop frequency_penalty presence_penalty response_format logit_bias reasoning_effort"
_COMMON += " parallel_tool_calls tool_choice"
_SERVED = f"{_COMMON} top_k min_p ignore_eos continue_final_message chat_template_kwargs"
SAMPLING: Mapping[Engine, frozenset[str]] = {
    "openai": _names(
        f"{_COMMON} verbosity service_tier prediction reasoning text truncation store metadata user prompt_cache_key"
        " prompt_cache_retention safety_identifier"
    ),
    "anthropic": _names(
        "temperature top_p top_k stop_sequences thinking output_config output_format service_tier metadata tool_choice"
        " context_management inference_geo speed"
    ),
    "vllm": _names(
        f"{_SERVED} repetition_penalty length_penalty stop_token_ids include_stop_str_in_output min_tokens"
        " skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side allowed_token_ids"
        " bad_words structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend"
        " guided_whitespace_pattern structural_tag thinking_token_budget include_reasoning watermarking"
        " repetition_detection echo add_generation_prompt add_special_tokens documents chat_template media_io_kwargs"
        " mm_processor_kwargs priority cache_salt kv_transfer_params vllm_xargs stream_interval logits_processors"
    ),
    "sglang": _names(
        f"{_SERVED} repetition_penalty stop_token_ids stop_regex no_stop_trim min_tokens regex ebnf skip_special_tokens"
        " custom_logit_processor custom_params lora_path session_params separate_reasoning stream_reasoning priority"
        " cache_salt extra_key rid"
    ),
    "llamacpp": _names(
        f"{_SERVED} top_n_sigma typical_p xtc_probability xtc_threshold dynatemp_range dynatemp_exponent repeat_last_n"
        " repeat_penalty dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers mirostat"
        " mirostat_tau mirostat_eta adaptive_target adaptive_decay min_keep samplers grammar json_schema grammar_lazy"
        " grammar_triggers preserved_tokens lora cache_prompt id_slot n_keep n_discard n_indent n_cache_reuse"
        " t_max_predict_ms reasoning_format reasoning_budget_tokens reasoning_budget_message thinking_budget_tokens"
        " parse_tool_calls backend_sampling timings_per_token"
    ),
}
"""The trainer's parameters for each engine. Without an engine it can set any parameter that is not reserved."""
_RESERVED = _names(
    "model messages input instructions system tools functions stream stream_options logprobs top_logprobs n_probs"
    " include return_token_ids"
)
_NAMES_KEPT, _NAME_LENGTH = 200, 80  # of removed parameters, in a call's record


@dataclass(frozen=True, slots=True)
class AllowedRequest:
    """An agent's request after `allow`, and the names of removed parameters; `tools.strict` is a field of one tool."""

    body: dict[str, Any]
    removed: tuple[str, ...] = ()


def allow(
    dialect: AgentDialectName, body: Mapping[str, Any], *, engine: Engine | None = None, may_set: Collection[str] = ()
) -> AllowedRequest:
    """Remove the parameters that the agent does not decide. Other values stay the same objects.

    Args:
        dialect: The dialect of the agent.
        body: The request.
        engine: The engine that the trainer names.
        may_set: More names that the trainer leaves to the agent, in the form of `AllowedRequest.removed`.
    """
    names = AGENT_PARAMETERS[dialect] | (ENGINE_PARAMETERS.get(engine, frozenset()) if engine else frozenset())
    remaining: dict[str, Any] = {}
    removed: list[str] = []
    for name, value in body.items():
        if name in may_set and name not in CHOICES:
            remaining[name] = value
        elif name in names:
            cleaned = _cleaned(dialect, name, value, may_set, removed)
            remaining.update({name: cleaned} if cleaned is not None or value is None else {})
        elif value is not None:
            removed.append(name)
    if body.get("tools") and not remaining.get("tools"):  # every tool was removed, and endpoints refuse an empty list
        removed += [name for name in ("tool_choice", "parallel_tool_calls") if remaining.pop(name, None) is not None]
        remaining.pop("tools", None)
    limit = asked_limit(body)
    if limit is not None and dialect in OUTPUT_LIMIT and not any(name in remaining for name in OUTPUT_LIMITS):
        remaining[OUTPUT_LIMIT[dialect]] = limit
    names_for_record = [name[:_NAME_LENGTH] for name in dict.fromkeys(removed)]
    return AllowedRequest(remaining, tuple(names_for_record[:_NAMES_KEPT]))


def asked_limit(body: Mapping[str, Any]) -> int | None:
    """Return the output token limit of a request, under any of its names."""
    config = body.get("generationConfig")
    values = [body[name] for name in OUTPUT_LIMITS if name in body]
    values += [config.get("maxOutputTokens")] if isinstance(config, Mapping) else []
    return next((limit for limit in map(token_limit, values) if limit is not None), None)


def token_limit(value: object) -> int | None:
    """Return a positive whole number; None for any other value."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def _cleaned(dialect: AgentDialectName, name: str, value: Any, may_set: Collection[str], removed: list[str]) -> Any:
    """Return a parameter's value without the fields that the agent does not decide, or None if nothing remains.

    Adds the names of removed fields to `removed`.
    """
    if name == "tools" and isinstance(value, list):
        tools = [_tool(dialect, tool, may_set, removed) for tool in value]
        same = all(one is other for one, other in zip(tools, value, strict=True))
        return value if same else [tool for tool in tools if tool is not None]
    if name == "messages" and isinstance(value, list):
        taken = {field for field in MESSAGE_PARAMETERS if f"messages.{field}" not in may_set}
        if not any([isinstance(message, dict) and not taken.isdisjoint(message) for message in value]):
            return value
        return [_without(message, taken, "messages", removed) for message in value]
    if name == "tool_choice" and _is_forced(value) and not _names_client_tool(value):
        removed.append(name)
        return None
    inner = INNER_PARAMETERS.get(name)
    if inner is None or not isinstance(value, dict):
        return value
    return _without(value, {key for key in value if key not in inner and f"{name}.{key}" not in may_set}, name, removed)


def _without(value: Any, keys: Collection[str], name: str, removed: list[str]) -> Any:
    if not isinstance(value, dict) or not any(key in value for key in keys):
        return value
    removed += [f"{name}.{key}" for key in value if key in keys]
    return {key: item for key, item in value.items() if key not in keys}


def _tool(dialect: AgentDialectName, tool: Any, may_set: Collection[str], removed: list[str]) -> Any:
    """Return a tool for the endpoint, or None if it is removed."""
    if not isinstance(tool, dict):
        return tool
    kind = str(tool.get("type") or "function")
    if not kind.startswith(CLIENT_TOOLS) and f"tools.{kind}" not in may_set:
        removed.append(f"tools.{kind}")
        return None
    if kind == "namespace" and isinstance(tool.get("tools"), list):
        tools = _cleaned(dialect, "tools", tool["tools"], may_set, removed)
        return tool if tools is tool["tools"] else {**tool, "tools": tools}
    for key in ("function", "custom"):  # chat completions nest the fields that other dialects put into the tool
        if isinstance(tool.get(key), dict):
            inside = _tool_fields(tool[key], may_set, removed)
            return tool if inside is tool[key] else {**tool, key: inside}
    if dialect == "openai_responses" and kind == "function" and "strict" not in tool:
        return {**tool, "strict": "tools.strict" in may_set}  # this API's default is true
    return _tool_fields(tool, may_set, removed)


def _tool_fields(tool: dict[str, Any], may_set: Collection[str], removed: list[str]) -> dict[str, Any]:
    changed = tool
    if tool.get("strict") and "tools.strict" not in may_set:
        removed.append("tools.strict")
        changed = {**changed, "strict": False}
    if _is_grammar(tool.get("format")) and "tools.format" not in may_set:
        changed = _without(changed, {"format"}, "tools", removed)
    return changed


def _names_client_tool(choice: object) -> bool:
    """Return whether a tool choice is satisfied by a tool that runs beside the agent."""
    kind = str(choice.get("type") or "function") if isinstance(choice, dict) else "function"
    return kind in _UNFORCED or kind.startswith((*CLIENT_TOOLS, "any", "tool", "allowed_tools"))


def _is_grammar(shape: object) -> bool:
    """Return whether the `format` of a tool or an answer constrains it."""
    return bool(shape) and not (isinstance(shape, dict) and shape.get("type") == "text")


def steering(dialect: Dialect, sent: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the reasons to exclude a request's answer from training, one per parameter; empty for a trainable one."""
    reasons = [*_steering_parameters(sent)]
    if _is_forced(sent.get("tool_choice")):
        reasons.append("tool_choice: forced tool")
    if _is_forced(sent.get("function_call")):
        reasons.append("function_call: forced tool")
    for name in ("text", "output_config"):
        if isinstance(sent.get(name), dict) and _is_grammar(sent[name].get("format")):
            reasons.append(f"{name}.format: constrained decoding")
    reasons += dict.fromkeys(f"tools.{name}: constrained decoding" for name, _ in _constrained_tools(sent.get("tools")))
    reasons += hidden_items(sent)
    conversation = sent.get("input" if dialect == "openai_responses" else "messages")
    last = conversation[-1] if isinstance(conversation, list) and conversation else None
    if isinstance(last, dict) and last.get("role") == "assistant":
        reasons.append("messages: forced prefix")
    return tuple(reasons)


def _steering_parameters(sent: Mapping[str, Any]) -> Iterable[str]:
    arguments = sent.get("chat_template_kwargs")
    sources = [("", sent), ("chat_template_kwargs.", arguments if isinstance(arguments, dict) else {})]
    for prefix, source in sources:
        for name in source:
            if name in STEERING and source[name] and not (name.endswith("format") and not _is_grammar(source[name])):
                yield f"{prefix}{name}: {STEERING[name]}"
        if source.get("add_generation_prompt") is False:
            yield f"{prefix}add_generation_prompt: forced prefix"


# An allow-list, because engines differ in how they read an object. These force nothing:
#
#   null   "auto"   "none"   {"type": "auto"}   {"type": "auto", "disable_parallel_tool_use": true}
#
# Any other key may name a tool: {"type": "auto", "name": "f"}, {"type": null, "function": {"name": "f"}}.
_UNFORCED = ("auto", "none")


def _is_forced(choice: object) -> bool:
    if isinstance(choice, dict):
        return choice.get("type") not in _UNFORCED or not choice.keys() <= {"type", "disable_parallel_tool_use"}
    return choice is not None and choice not in _UNFORCED


def hidden_items(sent: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the reason for items and messages that refer to content at the provider; empty without such items."""
    # OpenAI API, "Responses", `item_reference`: its `type` is optional, so an item with nothing but an `id` is one too.
    # "Chat completions": `{"role": "assistant", "audio": {"id": ...}}` refers to an answer that was spoken.
    items, messages = sent.get("input"), sent.get("messages")
    for item in items if isinstance(items, list) else ():
        kind = item.get("type") if isinstance(item, dict) else "text"
        is_empty = isinstance(item, dict) and "id" in item and item.keys() <= {"id", "type", "role", "status"}
        if kind == "item_reference" or is_empty or (kind is None and "role" not in item):
            return ("input.item_reference: hidden prompt",)
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict) and "audio" in message:
            audio = message["audio"]
            if isinstance(audio, dict) and "id" in audio:
                return ("messages.audio: hidden prompt",)
    return ()


def sampling_constraints(sent: Mapping[str, Any]) -> dict[str, Any]:
    """Return the grammars and schemas of a request that constrain sampling, by parameter; empty without any.

    Tools are listed if their arguments are constrained, by `strict` or a `format`. A forced choice counts as well:
    engines enforce the schema of the chosen tool.
    """
    limits: dict[str, Any] = {}
    arguments = sent.get("chat_template_kwargs")
    for prefix, source in (("", sent), ("chat_template_kwargs.", arguments if isinstance(arguments, dict) else {})):
        for name, value in source.items():
            if name in _GRAMMARS and value and not (name.endswith("format") and not _is_grammar(value)):
                limits[f"{prefix}{name}"] = value
    for name in ("text", "output_config"):
        if isinstance(sent.get(name), dict) and _is_grammar(sent[name].get("format")):
            limits[f"{name}.format"] = sent[name]["format"]
    for name in ("tool_choice", "function_call"):
        if _is_forced(sent.get(name)):
            limits[name] = sent[name]
    tools = [fields for _, fields in _constrained_tools(sent.get("tools"))]
    if tools:
        limits["tools"] = [fields for number, fields in enumerate(tools) if fields not in tools[:number]]
    return limits


def _constrained_tools(tools: object) -> Iterable[tuple[str, dict[str, Any]]]:
    """Yield the constraint of each constrained tool, `strict` or `format`, and the tool's fields."""
    for tool in tools if isinstance(tools, list) else ():
        if isinstance(tool, dict):
            yield from _constrained_tools(tool.get("tools"))
            for fields in (tool, tool.get("function"), tool.get("custom")):
                if isinstance(fields, dict) and fields.get("strict"):
                    yield "strict", fields
                if isinstance(fields, dict) and _is_grammar(fields.get("format")):
                    yield "format", fields


# The seed of a model call depends on four facts, and on nothing that differs between two equal runs:
#
#   seed of the run, group, sample ──derived_seed──> seed of the rollout ──derived_seed(that, call)──> seed of the call
#
# 31 bits, because servers read a seed as a signed or as an unsigned number of 32 bits. llama.cpp reads 2**32 - 1 as
# "random".
def derived_seed(*facts: int | str) -> int:
    """Return the first 31 bits of the SHA-256 of a JSON list, such as `[7,"sum",0]`, as a number."""
    text = json.dumps(facts, separators=(",", ":"))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4], "big") >> 1


NEUTRAL_SAMPLING: Mapping[str, float | int] = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Parameters that change the model's distribution, and their values without effect."""


SAMPLING_PARAMETERS = frozenset({"temperature", "repeat_penalty", *NEUTRAL_SAMPLING}).union(
    _names(
        "typical_p top_n_sigma mirostat mirostat_tau mirostat_eta xtc_probability xtc_threshold dry_multiplier"
        " dynatemp_range dynatemp_exponent length_penalty samplers"
    )
)
"""Parameters that decide the distribution of sampled tokens."""


def is_neutral(name: str, value: object) -> bool:
    """Return whether a sampling parameter has no effect with this value, so that an endpoint without it may do."""
    return value == (1.0 if name == "temperature" else NEUTRAL_SAMPLING.get(name))


def unasked_sampling(wanted: Mapping[str, Any], sent: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the differences between a request's sampling and the trainer's, one per parameter.

    A neutral value that the endpoint refused is not a difference: the endpoint lacks the parameter.

    Args:
        wanted: The parameters of the trainer.
        sent: The request.
    """
    reasons = []
    for name in sorted(SAMPLING_PARAMETERS.intersection((*wanted, *sent))):
        asked, value = wanted.get(name), sent.get(name)
        is_off = value is None and asked in (NEUTRAL_SAMPLING.get(name), 0 if name == "top_k" else None)
        if value == asked or is_off:
            continue
        text = f"{value!r}, not {asked!r} as the trainer asked" if name in wanted else f"{value!r}, the agent's own"
        reasons.append(f"{name}: {text}")
    return tuple(reasons)


def complete_sampling(dialect: Dialect, engine: Engine | None) -> frozenset[str]:
    """Return the parameters that together decide the distribution at an endpoint.

    A parameter missing in a request keeps the endpoint's default, from llama.cpp or a model's
    `generation_config.json`.
    """
    if dialect == "anthropic" or engine == "anthropic":
        return _names("temperature")  # Anthropic refuses others beside it, and they are off by default
    if dialect == "openai_responses":
        return _names("temperature top_p")
    if engine == "openai":
        return _names("temperature top_p frequency_penalty presence_penalty")
    names = frozenset({"temperature", *NEUTRAL_SAMPLING})
    return names - {"repetition_penalty"} | {"repeat_penalty"} if engine == "llamacpp" else names


def unknown_sampling(
    wanted: Mapping[str, Any], sent: Mapping[str, Any], dialect: Dialect, engine: Engine | None
) -> tuple[str, ...]:
    """Return the parameters of a request's distribution that neither the trainer nor the request names."""
    return tuple(sorted(complete_sampling(dialect, engine).difference(wanted, sent)))


def training_sampling(sampling: Mapping[str, Any] | None) -> dict[str, float | int]:
    """Return complete parameters that sample from the model's distribution at a temperature; empty for None.

    They override every default of an endpoint, such as the values in a model's `generation_config.json`.

    Raises:
        ValueError: the temperature is not above 0, or a parameter truncates or bends the distribution. The trainer's
            forward pass could not compute the probability of such samples.
    """
    if sampling is None:
        return {}
    if not isinstance(sampling, Mapping):
        raise ValueError("sampling must be a JSON object")
    unknown = sorted(set(sampling) - {"temperature", *NEUTRAL_SAMPLING})
    if unknown:
        raise ValueError(f"unsupported training sampling fields: {', '.join(unknown)}")
    temperature = finite_number(sampling.get("temperature"))
    if temperature is None or temperature <= 0:
        value = sampling.get("temperature")
        raise ValueError(f"training sampling requires a finite positive temperature, not {value!r}")
    for name, neutral in NEUTRAL_SAMPLING.items():
        value = sampling.get(name)
        if value is not None and finite_number(value) not in ((neutral, 0) if name == "top_k" else (neutral,)):
            raise ValueError(f"training sampling requires {name}={neutral}, not {value!r}")
    return {"temperature": temperature, **NEUTRAL_SAMPLING}


def finite_number(value: object) -> float | None:
    """Return a finite number; None for any other value."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return value if math.isfinite(value) else None


def check_trainer_parameters(engine: Engine | None, sampling: Collection[str], may_set: Collection[str]) -> None:
    """Check the parameters that a trainer sets, and the parameters that it leaves to the agent.

    Raises:
        ValueError: a parameter cannot be set, or the engine does not accept it.
    """
    for name in (*sampling, *may_set):
        if name in CHOICES:
            raise ValueError(f"{name!r} cannot be set: a call is one turn with one answer")
        if name in OUTPUT_LIMITS:
            raise ValueError(f"{name!r} cannot be set: `max_tokens_cap` limits answers")
    for name in sampling:
        if name in _RESERVED:
            raise ValueError(f"{name!r} is not a sampling parameter")
        if engine is not None and name not in SAMPLING[engine]:
            close = difflib.get_close_matches(name, SAMPLING[engine], 1)
            hint = f"; did you mean {close[0]!r}?" if close else "; remove `engine` to send it anyway"
            raise ValueError(f"{engine} does not accept {name!r}{hint}")
