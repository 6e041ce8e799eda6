"""TODO: the package openenv.server.fast."""
