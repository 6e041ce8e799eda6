from word_client import WordEnv
from word_env import WordAction, WordObservation, WordState

from openenv import HTTPEnvClient


class WordHTTP(HTTPEnvClient[WordAction, WordObservation, WordState]):
    _step_payload = WordEnv._step_payload
    _parse_result = WordEnv._parse_result
    _parse_state = WordEnv._parse_state


with WordHTTP(base_url="http://localhost:8000") as env:
    env.reset(seed=5)
    env.step(WordAction(guess="cable"))
    env.step(WordAction(guess="eagle"))
    print(env.state().step_count, env.session_id is not None)
