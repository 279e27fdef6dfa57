"""Counts each key's usage in the processes that send requests, journals it against crashes, and adds it up in one."""

from app.usage.counter import UsageCounter
from app.usage.exchange import UsageExchange
from app.usage.records import CallUsage, Owner, UsageAnswer, UsageQuery, UsageReport, Used, UsedFor, grouped

__all__ = [
    "CallUsage",
    "Owner",
    "UsageAnswer",
    "UsageCounter",
    "UsageExchange",
    "UsageQuery",
    "UsageReport",
    "Used",
    "UsedFor",
    "grouped",
]
