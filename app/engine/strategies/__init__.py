"""Batching strategies: when waiting sequences may join the running ones, and how many."""
