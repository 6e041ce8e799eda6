"""The server: one environment class behind HTTP and WebSocket, every surface on the same session manager."""
