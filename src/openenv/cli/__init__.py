"""The `openenv` command line. Knows every package; no package knows it."""
