"""KV blocks outside an engine's memory: in a folder shared by all replicas on a machine, and in other replicas."""
