"""TODO: the package openenv.testing.scripted."""
