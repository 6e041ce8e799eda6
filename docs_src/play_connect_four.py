from connect_four import ConnectFourEnv, Drop

with ConnectFourEnv("http://localhost:8000").sync() as env:
    result = env.reset(seed=4)
    while not result.done:
        result = env.step(Drop(column=3 if result.observation.board[0][3] == "." else 4))
    print("\n".join(result.observation.board), result.reward, sep="\n")
