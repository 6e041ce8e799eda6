"""Templates of imported packages: those of `openenv init`, with these files in their place."""
