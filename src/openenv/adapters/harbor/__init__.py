"""Harbor's tasks as environments: datasets of task folders, served and run with every agent and image sandbox.

The folders are read by `openenv.rollout.tasks.task_folders` and run by `openenv.rollout`. The third-party package
`harbor` is not needed, but for the few names that configure its own agents (`build_trial_config`, `install_fixes`).
"""
