"""The checks of `openenv validate`: a package's files, its behaviour while it is served, and running servers.

Observes environments from outside, as a client does, and owns only the process or container that it started.
"""
