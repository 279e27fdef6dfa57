"""The ingress's and the replica's ends of what runs between them: frames, journals, failover. No Ray, no HTTP."""

from app.fleet.attempt import Lost
from app.fleet.board import Board
from app.fleet.fleet import Calls, Fleet, FleetMetrics, Limits
from app.fleet.frame import Frame, Report
from app.fleet.line import Patience
from app.fleet.outbox import Outbox

__all__ = [
    "Board",
    "Calls",
    "Fleet",
    "FleetMetrics",
    "Frame",
    "Limits",
    "Lost",
    "Outbox",
    "Patience",
    "Report",
]
