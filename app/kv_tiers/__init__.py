"""KV blocks outside an engine's memory: in a folder that the replicas of a machine share, and in other replicas."""
