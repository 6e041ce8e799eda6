import time

from word_client import WordEnv
from word_env import WordAction

from openenv.errors import (
    ExecutionError,
    RequestTimeout,
    RequestValidationError,
    SessionCapacityError,
    SessionLost,
)


def play(env, word: str) -> float | None:
    """Play one episode; return None if it has no reward."""
    try:
        env.reset(seed=5)
        return env.step(WordAction(guess=word)).reward
    except RequestValidationError as exc:  # the action does not match its schema
        print("refused:", exc.details["errors"][0]["loc"])
    except ExecutionError as exc:  # the environment raised; the session continues
        print("environment failed:", exc)
    except (SessionLost, RequestTimeout) as exc:  # drop the episode; the next reset starts another
        print("episode lost:", exc)
    except SessionCapacityError as exc:  # try again later
        print(f"{exc.active_sessions} of {exc.max_sessions} sessions are taken")
        time.sleep(0.1)
    return None


with WordEnv(base_url="http://localhost:8000").sync() as env:
    print(play(env, "eagle"))
