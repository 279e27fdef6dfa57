"""Stores KV blocks outside an engine's memory: in a folder that a machine's replicas share, and in other replicas."""
