from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from openenv.train.trainers.trl import tool_environment


def train(url: str, model: object, **options: object) -> GRPOTrainer:
    rows = [{"prompt": [{"role": "user", "content": "Walk to the goal."}], "seed": seed} for seed in range(64)]
    with tool_environment(url) as environment:
        trainer = GRPOTrainer(
            model=model,
            train_dataset=Dataset.from_list(rows),
            environment_factory=environment,  # the tools, and the reward
            args=GRPOConfig(max_completion_length=2048, num_generations=8, **options),
        )
        trainer.train()
    return trainer


if __name__ == "__main__":
    train("http://localhost:8000", "Qwen/Qwen3-0.6B")
