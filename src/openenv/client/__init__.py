"""Clients: one set of request flows, driven either by an event loop or by a blocking socket."""
