"""One adapter per trainer: TRL, Stable-Baselines3, SkyRL, veRL, verifiers."""
