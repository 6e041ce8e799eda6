"""`/mcp`: OpenEnv's own JSON-RPC and standard MCP, on one path.

`endpoint` tells the two apart, `own` and `methods` answer them, `episodes` are the sessions behind, `reply` writes.
"""
