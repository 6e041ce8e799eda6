from pettingzoo.classic import rps_v2

from openenv.adapters.pettingzoo import pettingzoo_environment

RockPaperScissors = pettingzoo_environment(rps_v2.parallel_env, max_cycles=3)
