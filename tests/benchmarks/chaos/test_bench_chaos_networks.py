"""A network of our own, and packets that vanish on the way to another host in it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from benchmarks.chaos.networks import HERE, Host, own_network, why_no_networks

REASON = why_no_networks()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))


@pytest.fixture
def ends() -> Iterator[tuple[Host, socket.socket, socket.socket]]:
    """Another host, and a connection between it (the second end) and this one (the first)."""
    before = os.readlink("/proc/thread-self/ns/net")
    with own_network() as [host], socket.create_server((HERE, 0)) as listening:
        with host.visited():
            there = socket.create_connection(listening.getsockname(), timeout=5)
        here, _ = listening.accept()
        here.settimeout(0.3)
        there.settimeout(0.3)
        with here, there:
            yield host, here, there
    assert os.readlink("/proc/thread-self/ns/net") == before


def arrives(sender: socket.socket, receiver: socket.socket) -> bool:
    sender.sendall(b"x")
    try:
        return receiver.recv(1) == b"x"
    except TimeoutError:
        return False


def test_what_is_lost_in_one_direction_comes_through_in_the_other_and_all_of_it_once_mended(
    ends: tuple[Host, socket.socket, socket.socket],
) -> None:
    host, here, there = ends
    assert arrives(here, there)
    assert arrives(there, here)
    host.lose_what_it_sends()
    assert not arrives(there, here)
    assert arrives(here, there), "the way there is whole"
    host.mend()
    here.settimeout(5)
    assert here.recv(1) == b"x", "sent again"
    host.lose_what_is_sent_to_it()
    assert not arrives(here, there)
    host.mend()
    there.settimeout(5)
    assert there.recv(1) == b"x"
