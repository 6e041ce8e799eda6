from openenv.adapters.pettingzoo import pettingzoo_environment

RockPaperScissors = pettingzoo_environment("classic/rps_v2", max_cycles=3)
