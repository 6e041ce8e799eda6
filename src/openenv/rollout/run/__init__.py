"""Run rollouts: the engine, the phases of one rollout, many on one machine or on Ray."""
