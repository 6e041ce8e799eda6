from connect_four import ConnectFour, ConnectFourEnv, Drop

from openenv.testing import serve


def test_four_in_a_line_win():
    env = ConnectFour()
    env.reset(seed=1)
    env.columns[0] = ["X", "X", "X"]
    assert env.step(Drop(column=0)).reward == 1.0


def test_the_served_game_is_played_to_its_end():
    with serve(ConnectFour) as served, ConnectFourEnv(served.url).sync() as env:
        result = env.reset(seed=1)
        while not result.done:
            result = env.step(Drop(column=env.state().step_count % 7))
        assert result.reward in (0.0, 1.0)
