"""Rollouts on disk: outcomes, the store, its index."""
