"""Every name of the published capture package: importable from where it was, with the parameters that it had.

Ours may have more parameters, by keyword and with a default.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

PACKAGE = "openenv.core.harness.capture"
NAMES = """
(package)
    CaptureServer(*, llm_url, model, port, max_output_tokens, api_key, auth_header, capture_level, provider,
        admin_key, max_model_calls): start(timeout_s); stop()
    to_turn_records(graph, document)
    to_trace_entries(graph, document)
    to_training_trace(graph, document)
    measure_retokenization_skew(graph, document, tokenizer, *, chat_template, chat_template_kwargs)
    APIType
    detect(path, headers, body)
    RolloutGraph(): add_turn(node); children(node_id); discarded_nodes(); forks(); get(node_id); leaves();
        nodes(); path_to(leaf_id); paths(); root_of(node_id); roots(); sequence_for(leaf_id); sequences();
        stats()
    TurnNode(node_id, prompt_ids, sampled_ids, sampled_logprobs, parent_id, index, model, finish_reason,
        harness_session_id, system_digest, n_tools, request_messages, request_tools, sampling_params,
        requested_sampling_params, response_message): context_ids(parent)
    InferenceClient(base_url, *, served_model, api_key, auth_header, capture_level, provider): aclose();
        completion(request); list_models()
    UpstreamError
    LLMReport(ok, llm_url, model, findings, n_prompt_ids, n_completion_ids, served_models, capture_level,
        reachable, param_fixes, tool_support, logprobs_mode): summary()
    validate_llm(llm_url, model, *, provider, timeout, api_key, auth_header, check_logprobs_mode, check_tools)
    require_llm(llm_url, model, *, timeout, api_key, auth_header, require_tokens)
compat
    ParamFix(param, replacement, value): apply(body)
    behaviour_warnings(fixes)
    diagnose(body)
contract
    RolloutGraph
    TrainingTrace(**data): from_entries(entries); to_trace_entries(); unique_calls()
    TurnNode
    check_turn(prompt_ids, sampled_ids, logprobs, *, finish_reason, index)
    measure_retokenization_skew
    to_trace_entries
    to_training_trace
    to_turn_records
    validate_training_turn(prompt_ids, sampled_ids, logprobs, loss_mask)
detection
    APIType
    detect
    extract_model(api_type, body)
dialects
    APIType
    AnthropicTransformer: create_stream_state(original_request); is_streaming_request(body);
        transform_request(body); transform_response(response, original_request); transform_stream_chunk(chunk,
        original_request, is_first)
    BaseTransformer: create_stream_state(original_request); is_streaming_request(body); transform_request(body);
        transform_response(response, original_request); transform_stream_chunk(chunk, original_request,
        is_first)
    GoogleTransformer: create_stream_state(original_request); is_streaming_request(body);
        transform_request(body); transform_response(response, original_request); transform_stream_chunk(chunk,
        original_request, is_first)
    OpenAIChatTransformer: create_stream_state(original_request); is_streaming_request(body);
        transform_request(body); transform_response(response, original_request); transform_stream_chunk(chunk,
        original_request, is_first)
    OpenAIResponsesTransformer: create_stream_state(original_request); is_streaming_request(body);
        transform_request(body); transform_response(response, original_request); transform_stream_chunk(chunk,
        original_request, is_first)
    TransformManager(): get(api_type)
dialects.anthropic
    AnthropicStreamState(model, finish_to_stop_reason): finalize(); process_chunk(chunk, is_first)
    AnthropicTransformer
    BaseTransformer
    UpstreamRequestError
    anthropic_content_to_openai_chat(content)
    extract_reasoning_from_anthropic_content(content)
    make_signature(reasoning_text)
    openai_chat_content_to_anthropic_blocks(content)
dialects.base
    BaseTransformer
dialects.google
    BaseTransformer
    GoogleTransformer
    extract_reasoning_from_gemini_parts(parts)
    google_content_parts_to_openai_chat(parts)
    google_part_to_openai_chat(part)
    make_google_signature(reasoning_text)
    openai_chat_content_to_google_parts(content)
dialects.images
    anthropic_content_to_openai_chat
    anthropic_document_to_text(block)
    anthropic_image_to_openai_chat(block)
    google_content_parts_to_openai_chat
    google_part_to_openai_chat
    is_image_mime_type(mime_type)
    make_data_url(mime_type, data)
    openai_chat_content_to_anthropic_blocks
    openai_chat_content_to_google_parts
    openai_chat_image_to_anthropic(part)
    openai_chat_image_to_google(part)
    openai_content_from_text_and_images(parts, *, text_separator)
    openai_image_detail(block)
    openai_image_url(block)
    openai_image_url_block(url, *, detail)
    openai_responses_input_content_to_chat(content)
    openai_text_block(text)
    parse_data_url(url)
dialects.openai_chat
    BaseTransformer
    OpenAIChatTransformer
dialects.openai_responses
    BaseTransformer
    OpenAIResponsesTransformer
    ResponsesStreamState(model): finalize(); process_chunk(chunk, is_first)
    UpstreamRequestError
    encrypt_reasoning(reasoning_text)
    extract_reasoning_from_responses_item(item)
    openai_responses_input_content_to_chat
dialects.reasoning
    decrypt_reasoning(encrypted)
    encrypt_reasoning
    extract_reasoning_from_anthropic_content
    extract_reasoning_from_gemini_parts
    extract_reasoning_from_responses_item
    make_google_signature
    make_signature
export
    check_rollout(graph, *, expect_single_root, capture_level, budget_stop_count)
    check_sequence(seq, *, min_trainable)
    export_session(session, *, include_discarded, include_messages, capture_level)
    summarise(document)
forwarding
    CloudflareForwarder(tunnel_name, hostname, binary, startup_timeout_s): preflight(binary); start(local_port,
        *, local_host); stop()
    DirectExposure(advertise_host, scheme): preflight(); start(local_port, *, local_host); stop()
    ForwardingError
    GradioForwarder(share_server_address, share_server_tls_certificate): preflight(); start(local_port, *,
        local_host); stop()
    PortForwarder(): preflight(); start(local_port, *, local_host); stop()
    make_forwarder(kind, **kwargs)
graph
    RolloutGraph
    TrainingSequence(input_ids, loss_mask, logprobs, node_ids, prompt_len, root_id, n_turns): turn_lengths()
    TurnNode
    common_prefix_len(a, b)
providers
    ProviderConversionError
    UpstreamRequestError
    anthropic_request(request, model)
    anthropic_response(native, *, native_passthrough)
    openai_chat_content_to_anthropic_blocks
    replay_anthropic(native)
runner
    CaptureServer
    create_app(*, llm_url, model, engine, require_registered, max_output_tokens, api_key, auth_header, provider,
        capture_level, admin_key, max_model_calls)
server
    APIType
    InferenceClient
    SessionRegistry(*, require_registered): create(session_id, *, upstream, capture_level, purpose,
        eval_sampling, max_model_calls, sampling, **metadata); delete(session_id); get(session_id); list_ids();
        resolve(headers, body); summary()
    TransformManager
    TurnNode
    Upstream(llm_url, model, api_key, auth_header, provider)
    UpstreamError
    UpstreamHTTPError(status_code, body)
    UpstreamPool(*, default_client, default_level): forget(upstream); known(); resolve(upstream)
    UpstreamRequestError
    approximate_token_count(body)
    aux_dialect(path)
    aux_token_count_response(dialect, count)
    check_turn
    check_turn_eval(response_message, *, finish_reason, index)
    clamp_output_tokens(chat_request, cap)
    create_app
    detect
    evaluation_sampling(value)
    export_session
    extract_api_key(headers)
    extract_harness_session(headers, body)
    is_aux_route(path)
    main()
    normalise_client_payload(payload, api_type)
    normalise_for_capture(chat_request)
    normalise_response(response)
    rollout_type_for(purpose, capture_level)
    to_trace_entries
    training_sampling(sampling)
    truncating_params(request)
    wants_stream(path, body)
sessions
    RolloutGraph
    Session(session_id, created_at, graph, metadata, findings, last_turn_at, upstream_errors, upstream,
        capture_level, purpose, eval_sampling, model_calls, max_model_calls, budget_stop_count, sampling)
    SessionRegistry
    Upstream
    clean_session_id(value)
    evaluation_sampling
    extract_api_key
    extract_harness_session
    rollout_type_for
    training_sampling
sse
    APIType
    BaseTransformer
    format_chunk(api_type, transformer, chunk, original_request, *, is_first)
    format_events(api_type, events)
    keepalive_response(pending, api_type)
    replay(api_type, transformer, response, original_request)
    response_to_chunk(response)
upstream
    InferenceClient
    ParamFix
    UpstreamError
    UpstreamHTTPError
    UpstreamRequestError
    UpstreamTimeoutError
    UpstreamTransportError
    auth_headers(api_key, header)
    diagnose
    normalise_engine_base(url)
    normalize_response(response)
    openai_api_base(url)
    prepare_request(request, *, served_model, capture_level)
    training_sampling
    truncating_params
validate
    Finding(level, code, detail)
    Report(findings, aux_node_ids): add(level, code, detail); merge(other); text()
    check_rollout
    check_sequence
    check_turn
    check_turn_eval
    check_upstream_response(payload)
    validate_training_turn
validate_llm
    LLMReport
    auth_headers
    behaviour_warnings
    check_upstream_response
    diagnose
    list_models(llm_url, timeout, api_key, auth_header)
    normalise_engine_base
    normalize_response
    openai_api_base
    probe_logprobs_mode(base, model, *, timeout, api_key, auth_header, fixes)
    probe_tool_support(base, model, *, timeout, api_key, auth_header, fixes)
    require_llm
    validate_llm
"""
"""A module, and its names: `Class(parameters): method(parameters); ...`, `function(parameters)`, or the name alone."""


def table() -> list[tuple[str, str]]:
    """Each module with each line of its names."""
    found: list[tuple[str, str]] = []
    module = ""
    for line in NAMES.strip().splitlines():
        if not line.startswith(" "):
            module = PACKAGE if line == "(package)" else f"{PACKAGE}.{line}"
        elif line.startswith("        "):
            found[-1] = (module, f"{found[-1][1]} {line.strip()}")
        else:
            found.append((module, line.strip()))
    return found


def listed_parameters(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip() and part.strip() != "*"]


def check_parameters(callable_: Any, text: str, *, is_method: bool = False) -> None:
    """Ours has the listed parameters, those before `*` at the same places; others of its own have defaults."""
    parameters = list(inspect.signature(callable_).parameters.values())[1 if is_method else 0 :]
    names = [
        f"**{parameter.name}" if parameter.kind is parameter.VAR_KEYWORD else parameter.name for parameter in parameters
    ]
    listed = listed_parameters(text)
    positional = listed_parameters(text.partition("*")[0])
    assert names[: len(positional)] == positional
    assert set(listed) <= set(names)
    assert all(parameter.default is not parameter.empty for parameter in parameters if parameter.name not in text)


@pytest.mark.parametrize(("module", "line"), table())
def test_a_published_name_is_there_with_its_parameters(module: str, line: str) -> None:
    name = re.match(r"\w+", line)
    assert name is not None
    value = getattr(importlib.import_module(module), name[0])
    head, _, methods = line.partition("):" if "):" in line else ": ")
    if "(" in head:
        parameters = head.partition("(")[2].removesuffix(")")
        if "**data" not in parameters:  # a model
            check_parameters(value, parameters)
    for method in filter(None, map(str.strip, methods.split(";"))):
        method_name, _, rest = method.partition("(")
        kept = inspect.getattr_static(value, method_name)
        is_bound = isinstance(kept, classmethod | staticmethod)
        check_parameters(getattr(value, method_name), rest.removesuffix(")"), is_method=not is_bound)


@pytest.mark.parametrize("module", sorted({module for module, _ in table()}))
def test_a_module_lists_what_it_exports(module: str) -> None:
    exporting = importlib.import_module(module)
    names = {re.match(r"\w+", line)[0] for listed, line in table() if listed == module}  # type: ignore[index]
    assert names == set(exporting.__all__)


def test_errors_are_one_tree() -> None:
    upstream = importlib.import_module(f"{PACKAGE}.upstream")
    providers = importlib.import_module(f"{PACKAGE}.providers")
    assert issubclass(upstream.UpstreamError, RuntimeError)
    for name in ("UpstreamHTTPError", "UpstreamRequestError", "UpstreamTimeoutError", "UpstreamTransportError"):
        assert issubclass(getattr(upstream, name), upstream.UpstreamError)
    assert issubclass(providers.ProviderConversionError, upstream.UpstreamRequestError)
