"""The names that existing code imports, module by module: exactly these, all importable.

A name of a feature that is not there yet must say so: an ImportError that names the feature, not a missing attribute.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from collections.abc import Iterator

import pytest

MODELS = """
    Action BaseMessage CodeExecResult ConcurrencyConfig EnvironmentMetadata GetTaskRangeRequest GetTaskRequest
    HealthResponse HealthStatus ListTasksRequest NumTasksRequest Observation ResetRequest ResetResponse Scalar
    SchemaResponse ServerCapacityStatus ServerMode SessionInfo State StepRequest StepResponse WSCloseMessage
    WSErrorCode WSErrorResponse WSIncomingMessage WSObservationResponse WSResetMessage WSStateMessage WSStateResponse
    WSStepMessage
"""
ENV_SERVER = """
    Environment Transform TaskProvider Message ModelTokenizer
    Action Observation State SchemaResponse HealthResponse HealthStatus ServerMode WSErrorCode BaseMessage
    ListTasksRequest NumTasksRequest GetTaskRequest GetTaskRangeRequest
    WSIncomingMessage WSResetMessage WSStepMessage WSStateMessage WSCloseMessage
    WSObservationResponse WSStateResponse WSErrorResponse
    ConcurrencyConfig ServerCapacityStatus SessionInfo
    OpenEnvError ConcurrencyConfigurationError SessionCapacityError SessionNotFoundError SessionCreationError
    EnvironmentFactoryError
    CompositeTransform NullTransform MCPEnvironment HTTPEnvServer create_app create_fastapi_app
    deserialize_action deserialize_action_with_preprocessing serialize_observation GetEndpointConfig
    Tool ToolError ToolErrorType ListToolsAction CallToolAction ListToolsObservation CallToolObservation
    RESERVED_TOOL_NAMES WSMCPMessage WSMCPResponse JsonRpcErrorCode JsonRpcError JsonRpcRequest JsonRpcResponse
    McpMethod WebInterfaceManager create_web_interface_app
"""
LLM_CLIENTS = "AnthropicClient LLMClient LLMResponse OpenAIClient ToolCall create_llm_client"
CLIENTS = f"""
    EnvClient SyncEnvClient GenericEnvClient GenericAction HTTPEnvClient MCPClientBase MCPToolClient {LLM_CLIENTS}
"""
RUBRICS = """
    ExponentialDiscountingTrajectoryRubric Gate LLMJudge Rubric RubricDict RubricList Sequential TrajectoryRubric
    WeightedSum
"""

EXPORTS = {
    "openenv": """
        __version__ Action Observation State StepResult Environment MCPEnvironment tool Transform Rubric create_app
        create_fastapi_app EnvClient SyncEnvClient GenericEnvClient GenericAction HTTPEnvClient MCPToolClient LocalEnv
        VectorEnv AsyncVectorEnv AutoEnv AutoAction TaskClient connect
        core cli errors
    """,
    "openenv.core": f"{CLIENTS} {ENV_SERVER}",
    "openenv.core.env_server": ENV_SERVER,
    "openenv.core.env_server.types": MODELS,
    "openenv.core.env_server.mcp_types": """
        RESERVED_TOOL_NAMES Action BaseMessage CallToolAction CallToolObservation JsonRpcError JsonRpcErrorCode
        JsonRpcRequest JsonRpcResponse ListToolsAction ListToolsObservation McpMethod Observation Tool ToolError
        ToolErrorType WSMCPMessage WSMCPResponse
    """,
    "openenv.core.env_server.mcp_environment": "MCP_TOOL_CALL_TIMEOUT MCPEnvironment get_server_tools",
    "openenv.core.env_server.interfaces": """
        ActT Action Environment EnvironmentMetadata Message ModelTokenizer ObsT Observation State StateT TaskProvider
        Transform
    """,
    "openenv.core.env_server.base_transforms": "CompositeTransform NullTransform Observation Transform",
    "openenv.core.env_server.exceptions": """
        ConcurrencyConfigurationError EnvironmentFactoryError OpenEnvError SessionCapacityError SessionCreationError
        SessionNotFoundError
    """,
    "openenv.core.env_server.serialization": """
        Action CallToolAction ListToolsAction Observation deserialize_action deserialize_action_with_preprocessing
        serialize_observation
    """,
    "openenv.core.env_server.route_config": "GetEndpointConfig register_get_endpoints",
    "openenv.core.env_server.http_server": """
        Action CallToolAction CallToolObservation ConcurrencyConfig ConcurrencyConfigurationError Environment
        EnvironmentFactoryError EnvironmentMetadata GetEndpointConfig GetTaskRangeRequest GetTaskRequest HTTPEnvServer
        HealthResponse HealthStatus JsonRpcErrorCode JsonRpcRequest JsonRpcResponse ListTasksRequest ListToolsAction
        ListToolsObservation McpMethod NumTasksRequest Observation ResetRequest ResetResponse SchemaResponse
        ServerCapacityStatus ServerMode SessionCapacityError SessionInfo State StepRequest StepResponse WSCloseMessage
        WSErrorCode WSErrorResponse WSMCPMessage WSMCPResponse WSObservationResponse WSResetMessage WSStateMessage
        WSStateResponse WSStepMessage create_app create_fastapi_app deserialize_action register_get_endpoints
        serialize_observation
    """,
    "openenv.core.client_types": "ObsT StateT StepResult",
    "openenv.core.env_client": "ActT EnvClient ObsT StateT StepResult convert_to_ws_url hf_space_subdomain",
    "openenv.core.sync_client": "ActT EnvClient ObsT StateT StepResult SyncEnvClient",
    "openenv.core.generic_client": "EnvClient GenericAction GenericEnvClient StepResult",
    "openenv.core.http_env_client": "HTTPEnvClient StepResult",
    "openenv.core.mcp_client": """
        CallToolAction CallToolObservation EnvClient GenericMCPObservation ListToolsAction ListToolsObservation
        MCPClientBase MCPToolClient Observation State StepResult Tool ToolError
    """,
    "openenv.core.utils": "convert_to_ws_url hf_space_subdomain run_async_safely",
    "openenv.core.harness": """
        CLIHarnessAdapter HarnessAdapter HarnessRolloutResult HarnessRunLimits LoopOwningSession MCPHarnessAdapter
        Message ModelStep ModelStepResult RESERVED_TOOL_NAMES ResourceSession ResourceSessionFactory RolloutEvent
        SessionMCPBridge StepEnvSessionAdapter ToolResult ToolTraceEntry TraceEntry TrainableSession TrainingTrace
        TrainingTurn VerifyResult build_harness_rollout_func
        AgenticHarnessAdapter HarnessAction HarnessClientMessage HarnessConfig HarnessEnvironment HarnessError
        HarnessEvent HarnessEventType HarnessMCPBridge HarnessNotRunningError HarnessProcess HarnessResponse
        HarnessStartupError HarnessTransport HarnessTurnTimeoutError build_bridge_server events_to_metadata
        resolve_tool_conflicts
    """,
    "openenv.core.harness.adapter": """
        AgenticHarnessAdapter HarnessError HarnessNotRunningError HarnessStartupError HarnessTurnTimeoutError
    """,
    "openenv.core.harness.bridge": "HarnessMCPBridge build_bridge_server",
    "openenv.core.harness.collect": """
        CollectResult CollectRunner EpisodeRecord METADATA_FILENAME README_FILENAME RESULTS_FILENAME RolloutSerializer
        build_dataset_readme build_model_step push_to_hf_hub
    """,
    "openenv.core.harness.config": "HarnessConfig HarnessTransport",
    "openenv.core.harness.environment": "HarnessAction HarnessEnvironment",
    "openenv.core.harness.events": """
        HarnessClientMessage HarnessEvent HarnessEventType HarnessProtocolError HarnessResponse events_to_metadata
    """,
    "openenv.core.harness.process": "HarnessProcess",
    "openenv.core.harness.tools": "resolve_tool_conflicts",
    "openenv.core.harness.rollout": """
        CLIHarnessAdapter HarnessAdapter HarnessRolloutResult HarnessRunLimits LoopOwningSession MCPHarnessAdapter
        Message ModelStep ModelStepResult RESERVED_TOOL_NAMES ResourceSession ResourceSessionFactory RolloutEvent
        SessionMCPBridge StepEnvSessionAdapter ToolResult ToolTraceEntry TraceEntry TrainableSession VerifyResult
        build_harness_rollout_func
    """,
    "openenv.core.harness.training": "TrainingTrace TrainingTurn validate_training_turn",
    "openenv.core.harness.capture": """
        APIType CaptureServer InferenceClient LLMReport RolloutGraph TurnNode UpstreamError detect
        measure_retokenization_skew require_llm to_trace_entries to_training_trace to_turn_records validate_llm
    """,
    "openenv.core.harness.capture.compat": "ParamFix behaviour_warnings diagnose",
    "openenv.core.harness.capture.contract": """
        RolloutGraph TrainingTrace TurnNode check_turn measure_retokenization_skew to_trace_entries
        to_training_trace to_turn_records validate_training_turn
    """,
    "openenv.core.harness.capture.detection": "APIType detect extract_model",
    "openenv.core.harness.capture.dialects": """
        APIType AnthropicTransformer BaseTransformer GoogleTransformer OpenAIChatTransformer
        OpenAIResponsesTransformer TransformManager
    """,
    "openenv.core.harness.capture.dialects.anthropic": """
        AnthropicStreamState AnthropicTransformer BaseTransformer UpstreamRequestError
        anthropic_content_to_openai_chat extract_reasoning_from_anthropic_content make_signature
        openai_chat_content_to_anthropic_blocks
    """,
    "openenv.core.harness.capture.dialects.base": "BaseTransformer",
    "openenv.core.harness.capture.dialects.google": """
        BaseTransformer GoogleTransformer extract_reasoning_from_gemini_parts google_content_parts_to_openai_chat
        google_part_to_openai_chat make_google_signature openai_chat_content_to_google_parts
    """,
    "openenv.core.harness.capture.dialects.images": """
        anthropic_content_to_openai_chat anthropic_document_to_text anthropic_image_to_openai_chat
        google_content_parts_to_openai_chat google_part_to_openai_chat is_image_mime_type make_data_url
        openai_chat_content_to_anthropic_blocks openai_chat_content_to_google_parts openai_chat_image_to_anthropic
        openai_chat_image_to_google openai_content_from_text_and_images openai_image_detail openai_image_url
        openai_image_url_block openai_responses_input_content_to_chat openai_text_block parse_data_url
    """,
    "openenv.core.harness.capture.dialects.openai_chat": "BaseTransformer OpenAIChatTransformer",
    "openenv.core.harness.capture.dialects.openai_responses": """
        BaseTransformer OpenAIResponsesTransformer ResponsesStreamState UpstreamRequestError encrypt_reasoning
        extract_reasoning_from_responses_item openai_responses_input_content_to_chat
    """,
    "openenv.core.harness.capture.dialects.reasoning": """
        decrypt_reasoning encrypt_reasoning extract_reasoning_from_anthropic_content
        extract_reasoning_from_gemini_parts extract_reasoning_from_responses_item make_google_signature
        make_signature
    """,
    "openenv.core.harness.capture.export": "check_rollout check_sequence export_session summarise",
    "openenv.core.harness.capture.forwarding": """
        CloudflareForwarder DirectExposure ForwardingError GradioForwarder PortForwarder make_forwarder
    """,
    "openenv.core.harness.capture.graph": "RolloutGraph TrainingSequence TurnNode common_prefix_len",
    "openenv.core.harness.capture.providers": """
        ProviderConversionError UpstreamRequestError anthropic_request anthropic_response
        openai_chat_content_to_anthropic_blocks replay_anthropic
    """,
    "openenv.core.harness.capture.runner": "CaptureServer create_app",
    "openenv.core.harness.capture.server": """
        APIType InferenceClient SessionRegistry TransformManager TurnNode Upstream UpstreamError UpstreamHTTPError
        UpstreamPool UpstreamRequestError approximate_token_count aux_dialect aux_token_count_response check_turn
        check_turn_eval clamp_output_tokens create_app detect evaluation_sampling export_session extract_api_key
        extract_harness_session is_aux_route main normalise_client_payload normalise_for_capture normalise_response
        rollout_type_for to_trace_entries training_sampling truncating_params wants_stream
    """,
    "openenv.core.harness.capture.sessions": """
        RolloutGraph Session SessionRegistry Upstream clean_session_id evaluation_sampling extract_api_key
        extract_harness_session rollout_type_for training_sampling
    """,
    "openenv.core.harness.capture.sse": """
        APIType BaseTransformer format_chunk format_events keepalive_response replay response_to_chunk
    """,
    "openenv.core.harness.capture.upstream": """
        InferenceClient ParamFix UpstreamError UpstreamHTTPError UpstreamRequestError UpstreamTimeoutError
        UpstreamTransportError auth_headers diagnose normalise_engine_base normalize_response openai_api_base
        prepare_request training_sampling truncating_params
    """,
    "openenv.core.harness.capture.validate": """
        Finding Report check_rollout check_sequence check_turn check_turn_eval check_upstream_response
        validate_training_turn
    """,
    "openenv.core.harness.capture.validate_llm": """
        LLMReport auth_headers behaviour_warnings check_upstream_response diagnose list_models normalise_engine_base
        normalize_response openai_api_base probe_logprobs_mode probe_tool_support require_llm validate_llm
    """,
    "openenv.core.env_server.web_interface": """
        ActionLog EpisodeState WebInterfaceManager create_web_interface_app get_quick_start_markdown
        load_environment_metadata
    """,
    "openenv.core.llm_client": f"""
        {LLM_CLIENTS} _clean_mcp_schema _mcp_tools_to_anthropic _mcp_tools_to_openai _openai_msgs_to_anthropic
    """,
    "openenv.auto": "AutoAction AutoEnv",
    "openenv.auto._discovery": "EnvironmentDiscovery EnvironmentInfo get_discovery reset_discovery",
    "openenv.discovery": """
        CatalogChanges CatalogError CatalogSnapshot DiscoveryEntry ENVIRONMENT_MEDIA_TYPE EnvironmentCard
        PROFILE_VERSION SearchMatch build_catalog compare_catalogs load_catalog resolve_entry search_catalog
        write_catalog
    """,
    "openenv.core.containers.runtime": (
        "ContainerProvider DockerSwarmProvider KubernetesProvider LocalDockerProvider RuntimeProvider UVProvider"
    ),
    "openenv.core.evals": "EvalConfig EvalHarness EvalResult InspectAIHarness",
    "openenv.core.evals.base": "EvalConfig EvalHarness EvalResult",
    "openenv.core.evals.inspect_harness": "EvalHarness InspectAIHarness",
    "openenv.core.evals.types": "EvalConfig EvalResult",
    "openenv.core.rubrics": RUBRICS,
    "openenv.core.rubrics.base": "Rubric",
    "openenv.core.rubrics.containers": "Gate Rubric RubricDict RubricList Sequential WeightedSum",
    "openenv.core.rubrics.trajectory": "ExponentialDiscountingTrajectoryRubric Rubric TrajectoryRubric",
    "openenv.core.rubrics.llm_judge": "LLMJudge Rubric",
    "openenv.core.tools": "GitServerClient PyExecutor RepoInfo",
    "openenv.core.tools.git_server_client": "GitServerClient RepoInfo",
    "openenv.core.tools.local_python_executor": "CodeExecResult PyExecutor",
    "openenv_core": f"{CLIENTS} {ENV_SERVER} StepResult",
    "openenv_core.env_server": ENV_SERVER,
    "openenv_core.env_server.types": MODELS,
    "openenv_core.http_env_client": "HTTPEnvClient StepResult",
}


@pytest.fixture(autouse=True)
def _no_deprecation_noise() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


@pytest.mark.parametrize("module", EXPORTS)
def test_a_module_exports_exactly_the_names_it_lists(module: str) -> None:
    exported = list(importlib.import_module(module).__all__)
    assert sorted(exported) == sorted(EXPORTS[module].split())
    assert len(exported) == len(set(exported))


@pytest.mark.parametrize("module", EXPORTS)
def test_every_exported_name_is_there(module: str) -> None:
    exporting = importlib.import_module(module)
    for name in EXPORTS[module].split():
        assert getattr(exporting, name) is not None, name
        assert name in dir(exporting)


@pytest.mark.parametrize("module", EXPORTS)
def test_a_star_import_works(module: str) -> None:
    namespace: dict[str, object] = {}
    exec(f"from {module} import *", namespace)
    assert set(EXPORTS[module].split()) <= set(namespace)


@pytest.mark.parametrize("module", EXPORTS)
def test_a_name_that_never_was_is_an_ordinary_import_error(module: str) -> None:
    exporting = importlib.import_module(module)
    assert not hasattr(exporting, "NoSuchName")
    with pytest.raises(ImportError):
        exec(f"from {module} import NoSuchName", {})


def test_one_class_has_one_identity_on_all_paths() -> None:
    modules = [module for module in EXPORTS if module != "openenv"]
    for name in ("Action", "Observation", "State", "Environment", "EnvClient", "StepResult", "Rubric"):
        classes = {getattr(importlib.import_module(m), name) for m in modules if name in EXPORTS[m].split()}
        models = {cls for cls in classes if cls.__module__ == "openenv_core.env_server.types"}  # may be dataclasses
        [current] = classes - models
        assert len(models) <= 1
        assert all(issubclass(cls, current) for cls in models)


def test_submodules_are_attributes_of_their_packages() -> None:
    script = (
        "import openenv.core.env_server, openenv_core\n"
        "assert openenv.core.utils.convert_to_ws_url and openenv.core.env_client.EnvClient\n"
        "for name in 'types interfaces exceptions mcp_types serialization base_transforms http_server'.split():\n"
        "    assert getattr(openenv.core.env_server, name).__name__.endswith(name)\n"
        "assert openenv_core.client_types.StepResult and openenv_core.env_server.types.Action\n"
        "assert openenv_core.http_env_client.HTTPEnvClient\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


@pytest.mark.parametrize("name", ["client_types", "containers", "env_client", "rubrics", "tools", "utils"])
def test_legacy_submodules_are_those_of_the_current_package(name: str) -> None:
    assert importlib.import_module(f"openenv_core.{name}") is importlib.import_module(f"openenv.core.{name}")


@pytest.mark.parametrize("name", ["base_transforms", "exceptions", "interfaces", "mcp_types", "serialization"])
def test_legacy_server_submodules_are_those_of_the_current_package(name: str) -> None:
    legacy = importlib.import_module(f"openenv_core.env_server.{name}")
    assert legacy is importlib.import_module(f"openenv.core.env_server.{name}")


def test_importing_the_legacy_package_warns_once_and_names_the_new_one() -> None:
    script = (
        "import warnings\n"
        "with warnings.catch_warnings(record=True) as caught:\n"
        "    warnings.simplefilter('always')\n"
        "    import openenv_core, openenv_core.env_server, openenv_core.http_env_client\n"
        "warned = [w for w in caught if issubclass(w.category, DeprecationWarning) and 'openenv' in str(w.message)]\n"
        "assert len(warned) == 1 and 'openenv.core' in str(warned[0].message), warned\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_legacy_clients_load_no_web_framework() -> None:
    script = (
        "import sys\n"
        "from openenv_core.http_env_client import HTTPEnvClient\n"
        "from openenv_core.env_server.types import Action, State\n"
        "from openenv_core.client_types import StepResult\n"
        "assert not {'fastapi', 'starlette', 'uvicorn'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True)


def test_the_package_tells_its_version() -> None:
    import openenv

    assert openenv._load_package_version() == openenv.__version__
    assert openenv.__version__.count(".") >= 2
