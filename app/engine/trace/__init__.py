"""The step log: what an engine decided in each step, recorded so that a run can be replayed. Off by default."""
