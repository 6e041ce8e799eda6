"""The tools of one environment: found, described and called. Knows FastMCP; must not know sessions or the wire."""
