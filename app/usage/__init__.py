"""The usage of each key: counted where requests are sent, journaled against crashes, and added up by one owner."""

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
