"""API keys, their limits, and what a key changes about a call."""
