"""Protocol v2, sans IO: many sessions on one connection, ids on every frame, JSON or MessagePack."""
