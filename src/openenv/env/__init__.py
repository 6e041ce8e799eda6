"""Environments: the class that authors write, how it is called, and what wraps its observations."""
