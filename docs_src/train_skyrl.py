import skyrl_gym

skyrl_gym.register(id="openenv", entry_point="openenv.train.trainers.skyrl:ServedTextEnv")


def play(url: str) -> None:  # as SkyRL's generator does
    row = {"prompt": [], "env_class": "openenv", "extra_info": {"reset": {"seed": 1}}}
    env = skyrl_gym.make(row["env_class"], env_config={"url": url, "max_turns": 6}, extras=row)
    conversation, _ = env.init(row["prompt"])
    print(conversation[-1]["content"])
    for answer in ("no", "yes"):
        result = env.step(answer)
        print(result["reward"], result["done"])
    env.close()


if __name__ == "__main__":
    play("http://localhost:8000")
