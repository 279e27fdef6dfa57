"""Counts each key's usage where requests are sent, journals it against crashes, and adds it up in one owner."""

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
