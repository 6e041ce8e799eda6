from __future__ import annotations

from typing import Any

from openenv.core.rubrics import Gate, Rubric, Sequential


class Compiles(Rubric):
    def forward(self, action: str, observation: Any) -> float:
        try:
            compile(action, "<answer>", "exec")
        except SyntaxError:
            return 0.0
        return 1.0


class Brevity(Rubric):
    def forward(self, action: str, observation: Any) -> float:
        return 1.0 / len(action.splitlines())


rubric = Sequential(Compiles(), Gate(Brevity(), threshold=0.4))
print(rubric("x = 1", None))  # both pass: the last score
print(rubric("x = ", None))  # the first one gives 0: the second is not called
print(rubric("a\nb\nc", None))  # below the gate's threshold
