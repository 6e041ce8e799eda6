"""The examples that learn on two cores: they reach what their page promises, with the seed that it names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "cpu"


@pytest.fixture
def networks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module of the networks."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import networks

    return networks


def run(script: str, *arguments: str, log: Path) -> list[dict[str, float]]:
    """Run an example with one thread for linear algebra, and return its log."""
    command = [sys.executable, str(FOLDER / script), "--log", str(log), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in log.read_text().splitlines()]


def slopes(function: Any, parameters: list[Any], step: float = 1e-3) -> list[Any]:
    """Return the gradient of a function by its parameters, by finite differences."""
    results = []
    for part in parameters:
        slope = np.zeros_like(part)
        for place in np.ndindex(part.shape):
            kept = part[place]
            part[place] = kept + step
            above = function()
            part[place] = kept - step
            slope[place] = (above - function()) / (2 * step)
            part[place] = kept
        results.append(slope)
    return results


def test_the_gradient_by_hand_is_that_of_the_clipped_loss(networks: ModuleType) -> None:
    chance = np.random.default_rng(0)
    network = networks.Network((3, 5, 4), chance, learning_rate=1.0)
    network.parameters = [part.astype(np.float64) for part in network.parameters]
    inputs, choices = chance.normal(size=(40, 3)), chance.integers(0, 4, 40)
    advantages = chance.normal(size=40)
    # Ratios on both sides of the limits, and none on them.
    old = networks.log_softmax(network(inputs))[np.arange(40), choices] + chance.choice([-0.4, -0.1, 0.1, 0.4], 40)

    def loss() -> float:
        logprobs = networks.log_softmax(network(inputs))
        ratio = np.exp(logprobs[np.arange(40), choices] - old)
        clipped = np.minimum(ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages)
        entropy = -(np.exp(logprobs) * logprobs).sum(axis=1)
        return float(-(clipped + 0.1 * entropy).mean())

    wanted = slopes(loss, network.parameters)
    layers = network.forward(inputs)
    slope = networks.clipped_slope(networks.log_softmax(layers[-1]), choices, old, advantages, entropy=0.1)
    # The first step of Adam from zero is the sign of the gradient, so its moments are compared instead.
    network._moments = [(np.zeros_like(part), np.zeros_like(part)) for part in network.parameters]
    network.descend(layers, slope, most=1e9)
    for (mean, _), expected in zip(network._moments, wanted, strict=True):
        assert mean / 0.1 == pytest.approx(expected, abs=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_grpo_gets_nine_tenths_of_the_best_reward(tmp_path: Path) -> None:
    log = run("gridworld_grpo.py", "--seed", "0", log=tmp_path / "log.jsonl")
    assert log[0]["share"] < 0
    assert log[-1]["share"] >= 0.9
    assert log[-1]["unseen"] >= 0.7


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_ppo_solves_cart_pole(tmp_path: Path) -> None:
    log = run("cartpole_ppo.py", "--seed", "0", log=tmp_path / "log.jsonl")
    assert log[0]["return"] < 50
    assert (log[-1]["episodes"], log[-1]["return"] >= 475) == (100, True)


@pytest.mark.slow
def test_several_seeds_leave_a_log_each(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "seeds.py"), "gridworld_grpo", "--seeds", "3", "4", "--logs", str(tmp_path)]
    done = subprocess.run([*command, "--updates", "2", "--maps", "4"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert [line.partition(":")[0] for line in done.stdout.splitlines() if "best unseen" in line] == [
        "seed 3",
        "seed 4",
    ]
    logs = [(tmp_path / f"gridworld_grpo-{seed}.jsonl").read_text().splitlines() for seed in (3, 4)]
    shares = [[json.loads(line)["share"] for line in log] for log in logs]
    assert shares[0] != shares[1]
