"""What `openenv validate` checks: the files of a package, how it behaves when it is served, and a running server.

Knows environments from outside, as a client sees them, and the process of a server that it has started itself.
"""
