"""Harbor's tasks as environments: datasets of task folders, served and run with every agent and image sandbox.

`openenv.rollout.tasks.task_folders` reads the folders and `openenv.rollout` runs them. Only `harbor_package` needs the
third-party package `harbor`, for those who run its agents.
"""
