"""Hosts of our own: a network for this process alone, other hosts in it, and packets on the way to them that vanish.

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
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from benchmarks.harness.command import BenchmarkError, ran

HERE = "10.77.0.1"
_CLONE_NEWNET = 0x40000000
_NOBODY = "02:00:00:00:00:99"
_OURS = "/proc/thread-self/ns/net"
_BRIDGE, _WIRE = "here", "there"  # where this host is on the wire, and where each of the others is


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
    address: str

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
        ran([*self.command, "ip", "neigh", "replace", HERE, "lladdr", _NOBODY, "dev", _WIRE, "nud", "permanent"])

    def lose_what_is_sent_to_it(self) -> None:
        ran(["ip", "neigh", "replace", self.address, "lladdr", _NOBODY, "dev", _BRIDGE, "nud", "permanent"])

    def lose_both_ways(self) -> None:
        self.lose_what_it_sends()
        self.lose_what_is_sent_to_it()

    def mend(self) -> None:
        """Nothing is lost any more."""
        ran([*self.command, "ip", "neigh", "flush", "dev", _WIRE, "nud", "permanent"])
        ran(["ip", "neigh", "flush", "to", self.address, "dev", _BRIDGE, "nud", "permanent"])


@contextmanager
def own_network(num_hosts: int = 1) -> Iterator[tuple[Host, ...]]:
    """This thread, and every process and thread that it starts, is in a network of its own, with other hosts in it.

    Raises:
        BenchmarkError: this machine allows none; see `why_no_networks`.
    """
    with _back_home(), ExitStack() as block:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            raise BenchmarkError(f"no network of our own: {os.strerror(ctypes.get_errno())}")
        _begin_wire()
        hosts = []
        for number in range(num_hosts):
            other = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
            block.callback(other.wait)
            block.callback(other.kill)
            hosts.append(Host(other.pid, f"10.77.0.{number + 2}"))
            _wire(hosts[-1], f"wire{number}")
        # Ray names a node by the address from which the rest of the world would be reached.
        ran(["ip", "route", "add", "default", "via", hosts[0].address])
        yield tuple(hosts)


def set_tcp_retries(number: int) -> None:
    """How often this host sends again what is not acknowledged (`net.ipv4.tcp_retries2`, 15 by default)."""
    ran(["sysctl", "--quiet", "--write", f"net.ipv4.tcp_retries2={number}"])


def _begin_wire() -> None:
    """The wire is a bridge in this network, which is also this host's own end of it."""
    ran(["ip", "link", "set", "lo", "up"])
    ran(["ip", "link", "add", "name", _BRIDGE, "type", "bridge"])
    ran(["ip", "address", "add", f"{HERE}/24", "dev", _BRIDGE])
    ran(["ip", "link", "set", _BRIDGE, "up"])


def _wire(host: Host, name: str) -> None:
    while os.readlink(f"/proc/{host.pid}/ns/net") == os.readlink(_OURS):  # it is about to have its own
        os.sched_yield()
    ran(["ip", "link", "add", "name", name, "type", "veth", "peer", "name", _WIRE, "netns", str(host.pid)])
    ran(["ip", "link", "set", name, "master", _BRIDGE, "up"])
    ran([*host.command, "ip", "link", "set", "lo", "up"])
    ran([*host.command, "ip", "address", "add", f"{host.address}/24", "dev", _WIRE])
    ran([*host.command, "ip", "link", "set", _WIRE, "up"])


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
