"""Prints, as JSON, how callables of the interface are called and what some of them return.

Run by interpreters with this package and with the published one.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import json
import sys
from collections.abc import Callable
from typing import Any

CALLABLES = {
    "openenv.core.client_types": "StepResult",
    "openenv.core.env_client": """
        EnvClient EnvClient.connect EnvClient.disconnect EnvClient.reset EnvClient.step EnvClient.state EnvClient.close
        EnvClient.sync EnvClient.new_session EnvClient.from_docker_image EnvClient.from_env EnvClient._step_payload
        EnvClient._parse_result EnvClient._parse_state
    """,
    "openenv.core.sync_client": """
        SyncEnvClient SyncEnvClient.connect SyncEnvClient.disconnect SyncEnvClient.reset SyncEnvClient.step
        SyncEnvClient.state SyncEnvClient.close SyncEnvClient.new_session
    """,
    "openenv.core.generic_client": "GenericEnvClient GenericAction",
    "openenv.core.mcp_client": "MCPToolClient.list_tools MCPToolClient.get_tool MCPToolClient.has_tool",
    "openenv.core.utils": "convert_to_ws_url hf_space_subdomain run_async_safely",
    "openenv.core.llm_client": "OpenAIClient AnthropicClient ToolCall LLMResponse create_llm_client",
    "openenv.core.env_server.types": """
        Action Observation State ResetRequest StepRequest ResetResponse StepResponse CodeExecResult EnvironmentMetadata
        SchemaResponse HealthResponse ListTasksRequest GetTaskRequest GetTaskRangeRequest WSResetMessage WSStepMessage
        ConcurrencyConfig ServerCapacityStatus ServerCapacityStatus.from_counts SessionInfo
    """,
    "openenv.core.env_server.mcp_types": """
        JsonRpcRequest JsonRpcResponse JsonRpcResponse.success JsonRpcResponse.error_response JsonRpcError
        JsonRpcError.from_code Tool ToolError ListToolsAction CallToolAction ListToolsObservation CallToolObservation
    """,
    "openenv.core.env_server.interfaces": """
        Environment Environment.reset Environment.step Environment.reset_async Environment.step_async Environment.close
        Environment.get_metadata Environment.render_web Environment.web_actions Environment._apply_transform
        Environment._apply_rubric Environment._apply_rubric_async Environment._reset_rubric
        Environment._reset_rubric_async TaskProvider.get_task_range
    """,
    "openenv.core.env_server.base_transforms": "CompositeTransform NullTransform",
    "openenv.core.env_server.exceptions": """
        ConcurrencyConfigurationError SessionCapacityError SessionNotFoundError SessionCreationError
        EnvironmentFactoryError
    """,
    "openenv.core.env_server.serialization": """
        deserialize_action deserialize_action_with_preprocessing serialize_observation
    """,
    "openenv.core.env_server.route_config": "GetEndpointConfig register_get_endpoints",
    "openenv.core.env_server.http_server": """
        create_app create_fastapi_app HTTPEnvServer HTTPEnvServer.register_routes HTTPEnvServer.get_session_info
        HTTPEnvServer.get_capacity_status
    """,
    "openenv.core.env_server.mcp_environment": """
        get_server_tools MCPEnvironment MCPEnvironment.step MCPEnvironment.step_async MCPEnvironment._step_impl
        MCPEnvironment.tool MCPEnvironment.execute_code MCPEnvironment.get_callables MCPEnvironment.mcp_session
    """,
    "openenv.core.rubrics": """
        Rubric Rubric.forward Rubric.__call__ Rubric.register_forward_hook Rubric.register_forward_pre_hook
        Rubric.named_rubrics Rubric.get_rubric Rubric.load_state_dict Sequential Gate WeightedSum RubricList RubricDict
        TrajectoryRubric TrajectoryRubric.score_trajectory ExponentialDiscountingTrajectoryRubric
    """,
    "openenv.core.harness": """
        ToolResult VerifyResult RolloutEvent ToolTraceEntry ModelStepResult HarnessRolloutResult HarnessRunLimits
        ResourceSession.call_tool ResourceSession.verify ResourceSessionFactory.create HarnessAdapter.run_white_box
        HarnessAdapter.run_black_box StepEnvSessionAdapter SessionMCPBridge CLIHarnessAdapter
        build_harness_rollout_func AgenticHarnessAdapter AgenticHarnessAdapter.start AgenticHarnessAdapter.stop
        AgenticHarnessAdapter.inject_tools AgenticHarnessAdapter.send_message AgenticHarnessAdapter.is_alive
        AgenticHarnessAdapter.send_message_streaming HarnessConfig HarnessEvent HarnessResponse HarnessClientMessage
        HarnessAction HarnessEnvironment HarnessEnvironment.reset HarnessEnvironment.reset_async
        HarnessEnvironment.step_async HarnessProcess HarnessProcess.start HarnessProcess.stop HarnessProcess.read_line
        HarnessProcess.write_line HarnessProcess.drain_stderr HarnessProcess.is_running HarnessMCPBridge
        HarnessMCPBridge.start HarnessMCPBridge.stop build_bridge_server resolve_tool_conflicts events_to_metadata
    """,
}
NAMES = [f"{module}.{name}" for module, names in CALLABLES.items() for name in names.split()]
VALUES: dict[str, Callable[[], Any]] = {}


def value(function: Callable[[], Any]) -> Callable[[], Any]:
    """Note something to compute; its name says what."""
    VALUES[function.__name__] = function
    return function


def parameters(name: str) -> list[list[str]]:
    """Describe each parameter by its name, its kind and its default."""
    module = next(module for module in sorted(CALLABLES, reverse=True) if name.startswith(f"{module}."))
    target: Any = importlib.import_module(module)
    for part in name.removeprefix(f"{module}.").split("."):
        target = getattr(target, part)
    return [
        [each.name, each.kind.name, "" if each.default is each.empty else _shown(each.default)]
        for each in inspect.signature(target).parameters.values()
    ]


def _shown(default: Any) -> str:
    return str(default.__name__) if isinstance(default, type) else repr(default)


@value
def the_text_of_an_observation() -> Any:
    from openenv.core.env_server.types import Observation

    class Seen(Observation):
        what: str = "x"

    return str(Seen(reward=1, done=True)), repr(Seen(metadata={"a": 1}))


@value
def models_that_dump_themselves() -> Any:
    from fastapi.testclient import TestClient

    from openenv.core.env_server import Action, Environment, Observation, State, create_app, serialize_observation

    class Masked(Observation):
        answer: Any = 42

        def model_dump(self, **kwargs: Any) -> dict[str, Any]:
            return {**super().model_dump(**kwargs), "answer": "hidden", "length": 2}

    class Hidden(State):
        answer: Any = 42

        def model_dump(self, **kwargs: Any) -> dict[str, Any]:
            return {"episode_id": self.episode_id}

    class Quiz(Environment):
        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
            return Masked()

        def step(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            return Masked(reward=0.5)

        @property
        def state(self) -> Any:
            return Hidden(episode_id="quiz")

    dumps = [serialize_observation(Masked(reward=1, metadata={"a": 1})), serialize_observation(Masked(reward=0.5))]
    with TestClient(create_app(Quiz, Action, Masked)) as client:
        dumps += [client.post("/reset").json(), client.post("/step", json={"action": {}}).json()]
        client.cookies.clear()
        with client.websocket_connect("/ws") as socket:
            for frame in ({"type": "reset"}, {"type": "step", "data": {}}, {"type": "state"}):
                socket.send_json(frame)
                dumps.append(socket.receive_json())
    return dumps


@value
def what_a_program_in_code_mode_earns() -> Any:
    from fastmcp import FastMCP

    from openenv.core.env_server.mcp_environment import MCPEnvironment, Observation
    from openenv.core.env_server.types import State

    class Coder(MCPEnvironment):
        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Any:
            return Observation()

        def _step_impl(self, action: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
            return Observation()

        @property
        def state(self) -> Any:
            return State()

    env = Coder(FastMCP("coder"))
    return [(done.reward, done.done) for done in map(env.execute_code, ("result = 1", "1 / 0", "a b"))]


@value
def forms_with_text_that_is_no_json() -> Any:
    from openenv.core.env_server.mcp_types import CallToolAction
    from openenv.core.env_server.serialization import deserialize_action_with_preprocessing

    try:
        deserialize_action_with_preprocessing(
            action_data={"type": "call_tool", "tool_name": "t", "arguments": "{bad"}, action_cls=CallToolAction
        )
    except Exception as exc:
        return type(exc).__name__


@value
def a_session_cannot_have_taken_fewer_than_no_steps() -> Any:
    from openenv.core.env_server.types import SessionInfo

    try:
        SessionInfo(session_id="s", created_at=1, last_activity_at=1, environment_type="E", step_count=-1)
    except Exception as exc:
        return type(exc).__name__


@value
def the_names_of_the_operations_of_an_episode() -> Any:
    from sample_echo import echo_app

    paths = echo_app().openapi()["paths"]
    return [paths[path]["post"]["operationId"] for path in ("/reset", "/step")]


@value
def rubrics_are_found_by_their_names() -> Any:
    from openenv.core.rubrics import Gate, Rubric, RubricDict, RubricList, Sequential, WeightedSum

    class Fixed(Rubric):
        def __init__(self, score: float) -> None:
            super().__init__()
            self.score = score

        def forward(self, action: Any, observation: Any) -> float:
            return self.score

    class Whole(Rubric):
        def __init__(self) -> None:
            super().__init__()
            self.first = Fixed(0.5)
            self.rest = WeightedSum([Gate(Fixed(0.5), threshold=0.4), Sequential(Fixed(1.0), Fixed(0.2))], [0.5, 0.5])
            self.several = RubricList([Fixed(0.1)])
            self.named = RubricDict({"tidy": Fixed(0.3)})

        def forward(self, action: Any, observation: Any) -> float:
            return float(self.first(action, observation) + self.rest(action, observation))

    whole, log = Whole(), []
    whole.register_forward_pre_hook(lambda rubric, action, observation: log.append(["before", action, observation]))
    whole.register_forward_hook(lambda rubric, action, observation, score: log.append(["after", score]))
    score = whole("a", "o")
    scores = {name: rubric.last_score for name, rubric in whole.named_rubrics()}
    return score, log, scores, whole.get_rubric("rest.rubric_1.rubric_0").last_score, whole.state_dict()


def _turn_based_agent() -> tuple[Any, Any]:
    """Write an adapter as authors of the published package do; return it and its environment."""
    from fastmcp import FastMCP

    from openenv.core.harness import (
        AgenticHarnessAdapter,
        HarnessConfig,
        HarnessEnvironment,
        HarnessEvent,
        HarnessEventType,
        HarnessNotRunningError,
    )

    class Adapter(AgenticHarnessAdapter):
        BUILTIN_TOOL_NAMES = frozenset({"bash"})

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.log: list[Any] = []

        async def start(self, working_directory: str) -> None:
            self.log.append(["start", working_directory])

        async def stop(self) -> None:
            self.log.append(["stop"])

        async def inject_tools(self, tools: Any, bridge_url: str | None = None) -> None:
            self.log.append(["inject", [tool.name for tool in tools], bridge_url is not None])

        async def is_alive(self) -> bool:
            return ["send", "die"] not in self.log

        async def send_message_streaming(self, message: str) -> Any:
            self.log.append(["send", message])
            if message == "crash":
                raise HarnessNotRunningError("gone")
            yield HarnessEvent(type=HarnessEventType.TEXT_OUTPUT, data={"text": message})
            if message == "slow":
                await asyncio.Event().wait()
            if message != "cut":
                done = message == "bye"
                yield HarnessEvent(
                    type=HarnessEventType.TURN_COMPLETE, data={"response": message.upper(), "done": done}
                )

    tools = FastMCP("tools")

    @tools.tool
    def bash(command: str) -> str:
        return command

    @tools.tool
    def add(a: int, b: int) -> int:
        return a + b

    adapter = Adapter(HarnessConfig(name="sample", command=["none"], session_timeout_s=2.0))
    return adapter, HarnessEnvironment(adapter, mcp=tools)


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        unsure = {"timestamp", "session_id", "episode_id"}
        return {key: _without_times(each) for key, each in value.items() if key not in unsure}
    return [_without_times(each) for each in value] if isinstance(value, list) else value


@value
def turns_of_an_agent() -> Any:
    from openenv.core.harness import HarnessAction, HarnessNotRunningError

    async def talk() -> Any:
        adapter, env = _turn_based_agent()
        said: list[Any] = []
        try:
            await env.step_async(HarnessAction(message="early"))
        except HarnessNotRunningError as exc:
            said.append(str(exc))
        said.append((await env.reset_async(episode_id="e")).metadata)
        for message in ("hello", "bye"):
            turn = await env.step_async(HarnessAction(message=message))
            said.append([turn.done, turn.reward, turn.metadata])
        said.append([env.state.episode_id, env.state.step_count, len(env.trajectory)])
        for message in ("slow", "crash", "cut"):
            await env.reset_async()
            turn = await env.step_async(HarnessAction(message=message))
            said.append(
                [turn.done, turn.metadata["error"], turn.metadata["error_type"], turn.metadata["turn_events"][-1]]
            )
        env.close()
        await asyncio.sleep(0.2)
        return said, adapter.log[:5]

    return _without_times(json.loads(json.dumps(asyncio.run(talk()))))


@value
def frames_of_a_conversation() -> Any:
    from fastapi.testclient import TestClient

    from openenv.core.env_server import Observation, create_app
    from openenv.core.harness import HarnessAction

    def conversation(client: Any, *frames: str) -> Any:
        said: list[Any] = []
        with client.websocket_connect("/harness") as socket:
            said.append(socket.receive_json())
            for frame in frames:
                socket.send_text(frame)
                while not said or said[-1]["type"] not in ("turn_complete", "protocol_error", "error"):
                    said.append(socket.receive_json())
                said.append({"type": "next"})
        return [[each["type"], {k: v for k, v in each.get("data", {}).items() if k != "message"}] for each in said]

    def message(text: str) -> str:
        return json.dumps({"type": "message", "content": text})

    app = create_app(lambda: _turn_based_agent()[1], HarnessAction, Observation, mode="production")
    with TestClient(app) as client:
        return _without_times(
            [
                conversation(client, message("hello"), "no json", "[]", '{"type": "step"}', message("bye")),
                conversation(client, message("slow")),
                conversation(client, message("crash")),
                conversation(client, message("cut")),
                conversation(client, message("die"), message("hello")),
            ]
        )


def main() -> None:
    """Print all of it."""
    printed = {
        "parameters": {name: parameters(name) for name in NAMES},
        "values": {name: function() for name, function in VALUES.items()},
    }
    json.dump(printed, sys.stdout)


if __name__ == "__main__":
    main()
