"""The web pages that show stored and running rollouts."""
