"""Links ingresses to replicas: dispatch, token frames, in-flight requests and failover. Contains no Ray and no HTTP."""

from app.engine.request import Address
from app.fleet.connection import FailoverLimits, FleetMetrics, FrameReader, connect
from app.fleet.fleet import Fleet, ReplicaTransport
from app.fleet.frame_server import FrameServer, report_of_engine
from app.fleet.frames import Frame, report_of
from app.fleet.gossip import Entry, Table, adapters_in, merged, with_entry
from app.fleet.in_flight import ReplicaLost
from app.fleet.ingress_session import IngressSession
from app.fleet.replica_registry import ReplicaRegistry

__all__ = [
    "Address",
    "Entry",
    "FailoverLimits",
    "Fleet",
    "FleetMetrics",
    "Frame",
    "FrameReader",
    "FrameServer",
    "IngressSession",
    "ReplicaLost",
    "ReplicaRegistry",
    "ReplicaTransport",
    "Table",
    "adapters_in",
    "connect",
    "merged",
    "report_of",
    "report_of_engine",
    "with_entry",
]
