"""Keeps Serve's own calls on this machine when the whole cluster is on it.

Every Serve replica opens a gRPC port for the calls of other deployments. Ray 2.60 binds it to all interfaces, and what
comes in is unpickled: whoever reaches the port can run code. Ray has no setting for it, so it is bound here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from ipaddress import ip_address
from typing import Any

import ray
from ray.serve._private import replica as serve_replica

logger = logging.getLogger(__name__)

_ALL_INTERFACES = "[::]:"


def keep_calls_on_loopback() -> None:
    """Bind the port that Serve is about to open in this process to 127.0.0.1 if the node has that address.

    Call it in a deployment's constructor: Serve opens the port after it.
    """
    if not ip_address(ray.util.get_node_ip_address()).is_loopback:
        return  # other nodes must reach it
    open_port: Callable[[Any, str], int] | None = getattr(serve_replica, "add_port_to_grpc_server", None)
    if open_port is None:
        logger.warning("this version of Ray opens its port for calls in another way; it may be on all interfaces")
        return
    if getattr(open_port, "is_on_loopback", False):
        return

    def open_on_loopback(server: Any, address: str) -> int:
        return open_port(server, address.replace(_ALL_INTERFACES, "127.0.0.1:"))

    open_on_loopback.is_on_loopback = True  # type: ignore[attr-defined]
    serve_replica.add_port_to_grpc_server = open_on_loopback
