"""Small networks in NumPy: layers with tanh between them, the gradient by hand, and Adam. Knows no environment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

Array = np.ndarray


class Network:
    """A multilayer perceptron and its optimizer.

    Args:
        widths: Of the layers, inputs and outputs included.
        chance: Where the first weights come from.
        learning_rate: The step of Adam.
        output_scale: Of the last weights; a small one makes outputs nearly equal at first.
    """

    def __init__(
        self, widths: Sequence[int], chance: np.random.Generator, *, learning_rate: float, output_scale: float = 1.0
    ) -> None:
        self.learning_rate = learning_rate
        self.parameters: list[Array] = []  # in turn weights and biases
        for rows, columns in pairwise(widths):
            self.parameters.append(chance.normal(0, rows**-0.5, (rows, columns)).astype(np.float32))
            self.parameters.append(np.zeros(columns, np.float32))
        self.parameters[-2] *= output_scale
        self._moments = [(np.zeros_like(part), np.zeros_like(part)) for part in self.parameters]
        self._updates = 0

    def forward(self, inputs: Array) -> list[Array]:
        """Return what each layer puts out, the inputs first."""
        layers = [inputs]
        for index in range(0, len(self.parameters), 2):
            outputs = layers[-1] @ self.parameters[index] + self.parameters[index + 1]
            is_last = index + 2 == len(self.parameters)
            layers.append(outputs if is_last else np.tanh(outputs))
        return layers

    def __call__(self, inputs: Array) -> Array:
        """Return the outputs."""
        return self.forward(inputs)[-1]

    def descend(self, layers: list[Array], slope: Array, *, most: float = 0.5) -> None:
        """Take a step of Adam down a slope.

        Args:
            layers: What `forward` returned.
            slope: The gradient of the loss by the outputs.
            most: A longer gradient is cut to this length.
        """
        gradients: list[Array] = []
        for index in range(len(self.parameters) - 2, -1, -2):
            inputs = layers[index // 2]
            gradients = [inputs.T @ slope, slope.sum(axis=0), *gradients]
            slope = (slope @ self.parameters[index].T) * (1 - inputs**2)  # of tanh, by its value
        length = float(np.sqrt(sum(float((gradient**2).sum()) for gradient in gradients)))
        cut = min(1.0, most / (length + 1e-8))
        self._updates += 1
        rate = self.learning_rate * (1 - 0.999**self._updates) ** 0.5 / (1 - 0.9**self._updates)
        for part, gradient, (mean, square) in zip(self.parameters, gradients, self._moments, strict=True):
            mean += 0.1 * (cut * gradient - mean)
            square += 0.001 * ((cut * gradient) ** 2 - square)
            part -= rate * mean / (np.sqrt(square) + 1e-8)


def log_softmax(logits: Array) -> Array:
    """Return the logarithms of the probabilities, row by row."""
    logits = logits - logits.max(axis=1, keepdims=True)
    normalised: Array = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    return normalised


def sample(logprobs: Array, chance: np.random.Generator) -> Array:
    """Draw a choice from each row."""
    choices: Array = (logprobs + chance.gumbel(size=logprobs.shape)).argmax(axis=1)
    return choices


def clipped_slope(
    logprobs: Array, choices: Array, old: Array, advantages: Array, *, clip: float = 0.2, entropy: float = 0.0
) -> Array:
    """Return the gradient, by the logits, of PPO's clipped loss less a bonus for entropy.

    Args:
        logprobs: Of every choice, now.
        choices: What was chosen.
        old: The log-probability of that when it was chosen.
        advantages: How much better it was than expected.
        clip: How far the ratio of the probabilities may go.
        entropy: The weight of the bonus.
    """
    rows, probabilities = np.arange(len(choices)), np.exp(logprobs)
    ratio = np.exp(logprobs[rows, choices] - old)
    # Where the clipped ratio counts, nothing is gained by going further: no gradient.
    is_free = np.where(advantages > 0, ratio < 1 + clip, ratio > 1 - clip)
    push = advantages * ratio * is_free
    slope = push[:, None] * probabilities
    slope[rows, choices] -= push
    surprise = -(probabilities * logprobs).sum(axis=1, keepdims=True)
    slope += entropy * probabilities * (logprobs + surprise)
    result: Array = (slope / len(rows)).astype(np.float32)
    return result
