"""Metrics, structured logs and traces of a server. Listens to sessions; no session, runner or protocol knows it."""
