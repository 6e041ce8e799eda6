"""`openenv gateway`: one address in front of many servers; each session stays with the server that has opened it."""
