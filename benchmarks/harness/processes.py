"""Reads the processes of a service from /proc: CPU time, memory, connections. Linux only."""

from __future__ import annotations

import os
import signal
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Process:
    """A snapshot of one process."""

    pid: int
    parent: int
    session: int
    cpu_s: float  # user and system time of all threads since the start, rounded to a clock tick (10 ms)
    title: str


def family(root: int) -> dict[int, Process]:
    """Return a process, its descendants, and the members of the sessions that these processes lead, by pid.

    A daemon has no parent. Only the daemon's session shows which process started it, even after that process has ended.
    """
    processes = {process.pid: process for process in _all()}
    found = {root}
    while True:
        more = {
            process.pid
            for process in processes.values()
            if process.pid not in found and (process.parent in found or process.session in found)
        }
        if not more:
            return {pid: processes[pid] for pid in found if pid in processes}
        found |= more


def cpu_between(before: Mapping[int, Process], after: Mapping[int, Process]) -> dict[str, float]:
    """Return the CPU seconds between two snapshots by process title, without processes that ended in between."""
    spent: defaultdict[str, float] = defaultdict(float)
    for pid, process in after.items():
        spent[process.title] += process.cpu_s - (before[pid].cpu_s if pid in before else 0.0)
    return dict(spent)


def resident_mib(pid: int) -> float:
    """Return the resident memory of a process; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except OSError:
        return 0.0


def connections(pids: Sequence[int]) -> set[tuple[int, int]]:
    """Return the TCP connections (IPv4) between these processes, as pairs of the listening and the connected pid."""
    found = _tcp(pids)
    listening = {each.port: each.pid for each in found if each.state == _LISTEN}
    return {
        (listening[each.remote_port], each.pid)
        for each in found
        if each.state == _ESTABLISHED and each.remote_port in listening
    }


def clients_of(pids: Sequence[int], port: int) -> tuple[int, int]:
    """Return the number of connections of these processes on a port (IPv4), and how many the client has closed."""
    held = [each.state for each in _tcp(pids) if each.port == port and each.state != _LISTEN]
    return len(held), held.count(_CLOSE_WAIT)


_ESTABLISHED, _CLOSE_WAIT, _LISTEN = "01", "08", "0A"


@dataclass(frozen=True, slots=True)
class _Tcp:
    pid: int
    port: int
    remote_port: int
    state: str


def _tcp(pids: Sequence[int]) -> list[_Tcp]:
    """Return the TCP sockets (IPv4) of these processes."""
    owners = {socket: pid for pid in pids for socket in _sockets(pid)}
    # sl local_address rem_address st tx:rx tr:tm retrnsmt uid timeout inode ...; an address is IP:port in hex
    rows = [line.split()[:10] for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [
        _Tcp(owners[inode], int(local.split(":")[1], 16), int(remote.split(":")[1], 16), state)
        for _, local, remote, state, *_, inode in rows
        if inode in owners
    ]


def _sockets(pid: int) -> set[str]:
    """Return the inodes of a process's sockets; none if the process has ended."""
    found = set()
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):
            with suppress(OSError):  # the descriptor was closed just now
                target = os.readlink(f"/proc/{pid}/fd/{name}")
                found |= {target[8:-1]} if target.startswith("socket:[") else set()
    return found


def kill_family(root: int) -> None:
    """Kill a process and its whole family, as when a machine loses its power."""
    for pid in family(root):
        with suppress(ProcessLookupError):  # the process ended with its parent
            os.kill(pid, signal.SIGKILL)


def _all() -> Iterator[Process]:
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat, command = (folder / "stat").read_text(), (folder / "cmdline").read_bytes()
        except OSError:
            continue  # the process ended just now
        # pid (name, with any characters) state ppid pgrp session ... utime stime
        head, _, rest = stat.rpartition(")")
        fields = rest.split()
        cpu_s = (int(fields[11]) + int(fields[12])) * tick_s
        yield Process(int(folder.name), int(fields[1]), int(fields[3]), cpu_s, _title(command, head.partition("(")[2]))


def _title(command: bytes, name: str) -> str:
    """Return Ray's title such as `ray::ServeReplica:carousel:ingress`, or else the name of the module or program."""
    first, *others = command.decode(errors="replace").rstrip("\0").split("\0")
    if first.startswith("ray::"):
        return first.split()[0]
    if "-m" in others[:-1]:
        return others[others.index("-m") + 1]
    script = next((Path(part).name for part in others if part.endswith(".py")), None)
    return script or Path(first).name or name
