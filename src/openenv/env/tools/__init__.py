"""The tools of one environment. Knows FastMCP; must not know sessions or the wire."""
