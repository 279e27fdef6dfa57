"""Measures the cost of killed processes in bulk runs."""
