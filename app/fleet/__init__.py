"""The ingress's and the replica's ends of what runs between them: frames, journals, failover. No Ray, no HTTP."""

from app.fleet.attempt import Lost
from app.fleet.board import Board
from app.fleet.fleet import Calls, Fleet, FleetMetrics, Limits
from app.fleet.frame import Frame, Report
from app.fleet.line import Patience
from app.fleet.outbox import Outbox
from app.fleet.port import Address, FramePort
from app.fleet.tap import frames_from

__all__ = [
    "Address",
    "Board",
    "Calls",
    "Fleet",
    "FleetMetrics",
    "Frame",
    "FramePort",
    "Limits",
    "Lost",
    "Outbox",
    "Patience",
    "Report",
    "frames_from",
]
