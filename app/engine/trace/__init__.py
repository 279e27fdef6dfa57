"""The step log, which records every decision of an engine so that a run can be replayed. Off by default."""
