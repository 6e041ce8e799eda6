"""Adapters between environments and other interfaces: Gymnasium, PettingZoo, verifiers, ORS, Inspect, Harbor, turns."""
