"""Facade: the capture of model calls, on the module path that existing code imports. No logic lives here."""
