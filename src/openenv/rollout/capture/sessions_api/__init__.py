"""The published capture API on the capture server: sessions with their ID as key, graphs, documents.

Calls, records, dialects and sampling rules come from `openenv.rollout.capture`; nothing here proxies a call.
"""
