"""The capture interface of the published package over this capture: sessions whose id is their key, graphs, documents.

Requests, records, dialects, prefixes and sampling rules are those of `openenv.rollout.capture`.
"""
