"""A private network for this process, with other hosts, and with packets that are lost on demand.

Uses Linux network namespaces, which need root, and changes nothing outside of them. Packets are lost as on a bad wire:
one end gets a wrong hardware address for the other end, so its packets are lost without an error.
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
_BRIDGE, _WIRE = "here", "there"  # the network devices of this host and of each other host


def why_no_networks() -> str | None:
    """Return why this machine cannot have a private network; None if it can."""
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
    """Another host in the network. The host exists until the process that holds its namespace ends."""

    pid: int
    address: str

    @property
    def command(self) -> list[str]:
        """The start of a command line that runs the rest of the command line on this host."""
        return ["nsenter", f"--net=/proc/{self.pid}/ns/net"]

    @contextmanager
    def visited(self) -> Iterator[None]:
        """Enter the host: sockets that this thread opens within the block belong to the host, even after the block."""
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
        """Stop losing packets."""
        ran([*self.command, "ip", "neigh", "flush", "dev", _WIRE, "nud", "permanent"])
        ran(["ip", "neigh", "flush", "to", self.address, "dev", _BRIDGE, "nud", "permanent"])


@contextmanager
def own_network(num_hosts: int = 1) -> Iterator[tuple[Host, ...]]:
    """Put this thread, and all processes and threads that it starts, into a private network; yield the other hosts.

    Raises:
        BenchmarkError: this machine allows no private network; see `why_no_networks`.
    """
    with _back_home(), ExitStack() as block:
        if ctypes.CDLL(None, use_errno=True).unshare(_CLONE_NEWNET):
            raise BenchmarkError(f"cannot create a private network: {os.strerror(ctypes.get_errno())}")
        _begin_wire()
        hosts = []
        for number in range(num_hosts):
            other = subprocess.Popen(["unshare", "--net", "sleep", "infinity"])
            block.callback(other.wait)
            block.callback(other.kill)
            hosts.append(Host(other.pid, f"10.77.0.{number + 2}"))
            _wire(hosts[-1], f"wire{number}")
        # Ray names a node by the source address of its default route.
        ran(["ip", "route", "add", "default", "via", hosts[0].address])
        yield tuple(hosts)


def set_tcp_retries(number: int) -> None:
    """Set how often this host retransmits unacknowledged TCP data (`net.ipv4.tcp_retries2`, 15 by default)."""
    ran(["sysctl", "--quiet", "--write", f"net.ipv4.tcp_retries2={number}"])


def _begin_wire() -> None:
    """Create the bridge that connects all hosts. The bridge is also the network device of this host."""
    ran(["ip", "link", "set", "lo", "up"])
    ran(["ip", "link", "add", "name", _BRIDGE, "type", "bridge"])
    ran(["ip", "address", "add", f"{HERE}/24", "dev", _BRIDGE])
    ran(["ip", "link", "set", _BRIDGE, "up"])


def _wire(host: Host, name: str) -> None:
    while os.readlink(f"/proc/{host.pid}/ns/net") == os.readlink(_OURS):  # until `unshare` has made the namespace
        os.sched_yield()
    ran(["ip", "link", "add", "name", name, "type", "veth", "peer", "name", _WIRE, "netns", str(host.pid)])
    ran(["ip", "link", "set", name, "master", _BRIDGE, "up"])
    ran([*host.command, "ip", "link", "set", "lo", "up"])
    ran([*host.command, "ip", "address", "add", f"{host.address}/24", "dev", _WIRE])
    ran([*host.command, "ip", "link", "set", _WIRE, "up"])


@contextmanager
def _back_home() -> Iterator[None]:
    """Return this thread to its present network namespace at the end of the block."""
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
