"""Requests that were answered wrongly here or elsewhere, with the right answers: `python -m benchmarks.cases`."""
