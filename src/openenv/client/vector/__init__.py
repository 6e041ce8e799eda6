"""TODO: the package openenv.client.vector."""
