"""Iteration-level batching in plain Python: no torch, no HTTP, no Ray."""
