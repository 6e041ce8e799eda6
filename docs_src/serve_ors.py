from ors import Environment, Split, TextBlock, ToolOutput, tool
from pydantic import BaseModel

from openenv.adapters.ors import ors_environment


class Answer(BaseModel):
    answer: int


class Sums(Environment):  # type: ignore[misc]
    @classmethod
    def list_splits(cls) -> list[Split]:
        return [Split(name="train", type="train")]

    @classmethod
    def list_tasks(cls, split: str) -> list[dict[str, int]]:
        return [{"one": 1, "other": 2}, {"one": 3, "other": 4}]

    def get_prompt(self) -> list[TextBlock]:
        return [TextBlock(text=f"What is {self.task_spec['one']} + {self.task_spec['other']}?")]

    @tool
    def submit(self, params: Answer) -> ToolOutput:
        """Answer the question."""
        right = params.answer == self.task_spec["one"] + self.task_spec["other"]
        return ToolOutput(blocks=[TextBlock(text="right" if right else "wrong")], reward=float(right), finished=True)


SumsEnvironment = ors_environment(Sums)
