"""Scheduling policies: which waiting sequence goes first, and which running one is preempted first."""
