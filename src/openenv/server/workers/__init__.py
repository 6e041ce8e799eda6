"""`openenv serve --workers N`: N processes on one port, as one server."""
