"""One environment package, written against the documented interface alone, on this package and on the published one.

The same files in `sample_env/`, the same scripts, the same expectations; only the interpreter differs.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(900)

MANY = {"MAX_CONCURRENT_ENVS": "64"}
EPISODE = [
    ["a", "reset", {"seed": 7, "episode_id": "e-1", "start": 3, "unknown": True}],
    ["a", "step", {"amount": 5}],
    ["a", "state", None],
    ["a", "step", {"amount": 2}],
]


def typed(total: int, *, seed: int | None = 7, reward: float | None = None, done: bool = False) -> dict[str, Any]:
    """What matters of a typed result."""
    return {"total": total, "seed": seed, "note": "—", "reward": reward, "done": done}


def seen(result: dict[str, Any]) -> dict[str, Any]:
    """Pick what matters from a typed result; it stands both in the result and in the observation."""
    observation = result["observation"]
    assert (result["reward"], result["done"]) == (observation["reward"], observation["done"])
    return {key: observation[key] for key in ("total", "seed", "note", "reward", "done")}


@pytest.mark.parametrize("use", ["async", "sync"])
def test_an_episode_with_the_packages_own_client(either: Any, server: Any, peer: Any, use: str) -> None:
    begun, first, state, last = peer(either).play(server(either, **MANY).url, EPISODE, use=use)
    assert seen(begun) == typed(3)
    assert begun["observation"]["metadata"] == {"extra": ["start", "unknown"]}
    assert seen(first) == typed(8, reward=2.5)
    assert state == {"episode_id": "e-1", "step_count": 1, "total": 8, "amounts": [5]}
    assert seen(last) == typed(10, reward=1.0, done=True)


@pytest.mark.parametrize("use", ["async", "sync"])
def test_an_asynchronous_helper_method_of_the_client(either: Any, server: Any, peer: Any, use: str) -> None:
    calls = [["a", "reset", {}], ["a", "add_all", [1, 2, 3]]]
    assert peer(either).play(server(either, **MANY).url, calls, use=use)[1] == 6


@pytest.mark.parametrize("use", ["async", "sync"])
def test_an_episode_with_the_generic_client(either: Any, server: Any, peer: Any, use: str) -> None:
    begun, first, state, last = peer(either).play(server(either, **MANY).url, EPISODE, client="generic", use=use)
    assert begun["metadata"] == {"extra": ["start", "unknown"]}
    assert begun["observation"] == {"metadata": begun["metadata"], "total": 3, "seed": 7, "note": "—"}
    assert (first["observation"]["total"], first["reward"], first["done"]) == (8, 2.5, False)
    assert state == {"episode_id": "e-1", "step_count": 1, "total": 8, "amounts": [5]}
    assert (last["observation"]["total"], last["reward"], last["done"]) == (10, 1.0, True)


def test_a_failing_step_raises_a_runtime_error_and_the_episode_goes_on(either: Any, server: Any, peer: Any) -> None:
    calls = [["a", "reset", {}], ["a", "step", {"amount": 1, "fail": "no luck"}], ["a", "step", {"amount": 1}]]
    _, failed, after = peer(either).play(server(either, **MANY).url, calls)
    assert "RuntimeError" in failed["raised"]
    assert failed["text"].startswith("Server error: no luck")
    assert failed["text"].endswith("(code: EXECUTION_ERROR)")
    assert after["observation"]["total"] == 1


@pytest.mark.parametrize("use", ["async", "sync"])
def test_a_full_server_refuses_with_a_runtime_error(either: Any, server: Any, peer: Any, use: str) -> None:
    calls = [["a", "reset", {}], ["b", "reset", {}], ["a", "step", {"amount": 1}]]
    for _ in range(50):  # the slot of an earlier script may still be coming free
        begun, refused, step = peer(either).play(server(either, MAX_CONCURRENT_ENVS="1").url, calls, use=use)
        if "raised" not in begun:
            break
    assert "RuntimeError" in refused["raised"]
    assert refused["text"].endswith("(code: CAPACITY_REACHED)")
    assert step["observation"]["total"] == 1
