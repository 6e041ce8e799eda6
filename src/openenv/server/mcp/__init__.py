"""`/mcp`: standard MCP and OpenEnv's own JSON-RPC, on one path."""
