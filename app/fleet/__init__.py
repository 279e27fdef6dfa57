"""Between ingress and replicas: dispatch, frames of tokens, requests in flight, failover. No Ray, no HTTP."""

from app.fleet.adapter_table import AdapterEntry, AdapterTable, adapters_in, merged
from app.fleet.fleet import FailoverLimits, Fleet, FleetMetrics, ReplicaTransport
from app.fleet.frame_client import FrameReader, LivenessTimeouts, connect
from app.fleet.frame_server import Address, FrameServer
from app.fleet.frames import Frame, report_of
from app.fleet.in_flight import ReplicaLost
from app.fleet.outbox import Outbox
from app.fleet.replica_registry import ReplicaRegistry

__all__ = [
    "AdapterEntry",
    "AdapterTable",
    "Address",
    "FailoverLimits",
    "Fleet",
    "FleetMetrics",
    "Frame",
    "FrameReader",
    "FrameServer",
    "LivenessTimeouts",
    "Outbox",
    "ReplicaLost",
    "ReplicaRegistry",
    "ReplicaTransport",
    "adapters_in",
    "connect",
    "merged",
    "report_of",
]
