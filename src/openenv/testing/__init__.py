"""TODO: the package openenv.testing."""
