"""Environments as packages: validate, discover, load by name, publish."""
