"""API keys, their limits, and the effects of a key on a call."""
