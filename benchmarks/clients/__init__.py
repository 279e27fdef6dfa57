"""Clients that we did not write, each in an environment of its own, against the live service."""
