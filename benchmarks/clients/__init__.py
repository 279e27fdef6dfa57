"""Clients that we did not write, each in its own environment, against the live service."""
