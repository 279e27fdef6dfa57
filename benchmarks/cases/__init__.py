"""Requests that went wrong here or elsewhere, with the answers that are right: `python -m benchmarks.cases`."""
