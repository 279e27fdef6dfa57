"""Blocks of KV beside an engine's memory: a folder that replicas of a machine share."""
