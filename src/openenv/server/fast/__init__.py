"""Serving on uvicorn's bare transport; `OPENENV_FAST=0` turns it off. See README.md."""
