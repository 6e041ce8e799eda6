from word_env import WordAction, WordObservation, WordState

from openenv import EnvClient


class WordEnv(EnvClient[WordAction, WordObservation, WordState]):
    pass
