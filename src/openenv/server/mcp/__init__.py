"""`/mcp`: standard MCP and OpenEnv's JSON-RPC on one path."""
