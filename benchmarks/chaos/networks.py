"""Hosts of our own: a network for this process alone, another host beside it, and packets between them that vanish.

Linux network namespaces, for which one has to be root; nothing outside of them is touched. Packets are lost as on a bad
wire: one end is given a wrong hardware address for the other, so what it sends is lost without an error.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from benchmarks.harness.command import BenchmarkError, ran

HERE, THERE = "10.77.0.1", "10.77.0.2"
_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:99"
_OURS = "/proc/thread-self/ns/net"
_WIRE_HERE, _WIRE_THERE = "here", "there"


def why_no_networks() -> str | None:
    """Why there can be no network of our own on this machine; None when there can."""
    missing = [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]
    if sys.platform != "linux" or missing:
        return f"needs Linux with the commands ip, nsenter and unshare; missing: {', '.join(missing) or 'Linux'}"
    try:
        ran(["unshare", "--net", "ip", "link", "add", "a1", "type", "veth"])
    except BenchmarkError as error:
        return f"needs root and virtual ethernet: {error}"
    return None


@dataclass(frozen=True, slots=True)
class Host:
    """Another host on the wire; it lives as long as the process that holds its network."""

    pid: int

    @property
    def command(self) -> list[str]:
        """What runs the rest of a command line over there."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Sockets that this thread opens meanwhile are over there, and stay there."""
        with _back_home():
            _enter(f"/proc/{self.pid}/ns/net")
            yield

    def lose_what_it_sends(self) -> None:
        ran([*self.command, "ip", "neigh", "replace", HERE, "lladdr", _NOBODY, "dev", _WIRE_THERE, "nud", "permanent"])

    def lose_what_is_sent_to_it(self) -> None:
        ran(["ip", "neigh", "replace", THERE, "lladdr", _NOBODY, "dev", _WIRE_HERE, "nud", "permanent"])

    def lose_both_ways(self) -> None:
        self.lose_what_it_sends()
        self.lose_what_is_sent_to_it()

    def mend(self) -> None:
        """Nothing is lost any more."""
        ran([*self.command, "ip", "neigh", "flush", "dev", _WIRE_THERE, "nud", "permanent"])
        ran(["ip", "neigh", "flush", "dev", _WIRE_HERE, "nud", "permanent"])


@contextmanager
def own_network() -> Iterator[Host]:
    """This thread, and every process and thread that it starts, is in a network of its own, with one other host in it.

    Raises:
        BenchmarkError: this machine allows none; see `why_no_networks`.
    """
    with _back_home():
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            raise BenchmarkError(f"no network of our own: {os.strerror(ctypes.get_errno())}")
        other = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
        host = Host(other.pid)
        try:
            _wire(host)
            yield host
        finally:
            other.kill()
            other.wait()


def set_tcp_retries(number: int) -> None:
    """How often this host sends again what is not acknowledged (`net.ipv4.tcp_retries2`, 15 by default)."""
    ran(["sysctl", "--quiet", "--write", f"net.ipv4.tcp_retries2={number}"])


def _wire(host: Host) -> None:
    while os.readlink(f"/proc/{host.pid}/ns/net") == os.readlink(_OURS):  # it is about to have its own
        os.sched_yield()
    ran(["ip", "link", "add", _WIRE_HERE, "type", "veth", "peer", "name", _WIRE_THERE, "netns", str(host.pid)])
    for within, wire, address in (([], _WIRE_HERE, HERE), (host.command, _WIRE_THERE, THERE)):
        ran([*within, "ip", "link", "set", "lo", "up"])
        ran([*within, "ip", "address", "add", f"{address}/24", "dev", wire])
        ran([*within, "ip", "link", "set", wire, "up"])
    # Ray names a node by the address from which the rest of the world would be reached.
    ran(["ip", "route", "add", "default", "via", THERE])


@contextmanager
def _back_home() -> Iterator[None]:
    """Into whatever network is entered meanwhile: this thread leaves it again."""
    home = os.open(_OURS, os.O_RDONLY)
    try:
        yield
    finally:
        _set_network(home)
        os.close(home)


def _enter(path: str) -> None:
    entered = os.open(path, os.O_RDONLY)
    try:
        _set_network(entered)
    finally:
        os.close(entered)


def _set_network(descriptor: int) -> None:
    if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
        raise BenchmarkError(f"cannot enter a network: {os.strerror(ctypes.get_errno())}")
