"""The wire, sans IO: bytes in, values out and back. No asyncio, no sockets, no threads in this package."""
