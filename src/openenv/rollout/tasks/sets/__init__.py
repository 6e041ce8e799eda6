"""The task sets of this package, one file each; `openenv.rollout.task_set(NAME)` finds them through entry points."""
