"""Templates of imported packages: these files replace or extend the templates of `openenv init`."""
