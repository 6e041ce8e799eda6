"""Verification: compute the reward in a sandbox the agent never touched."""
