"""More Ray nodes for a running service: on this machine, each a process tree of its own that can be lost as a whole."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos.stage import Stage
from benchmarks.harness.command import BenchmarkError
from benchmarks.harness.processes import family

_STOP_TIMEOUT_S = 10.0
_OBJECT_STORE_BYTES = 150 * 1024 * 1024  # as Ray's own tests have it; nothing here is stored


@dataclass(frozen=True, slots=True)
class Node:
    """A node that has joined, with its raylet, its agents and its workers."""

    stage: Stage
    pid: int

    def replicas(self) -> list[int]:
        return sorted(set(self.stage.replicas()) & family(self.pid).keys())

    def kill(self) -> None:
        """All of it at once, as when the machine loses its power; whoever talks to it has connections that break."""
        for pid in family(self.pid):
            os.kill(pid, signal.SIGKILL)


@contextmanager
def node(stage: Stage, *, within: Sequence[str] = (), address: str = "") -> Iterator[Node]:
    """Another node joins the service, which must be one that `may_be_joined`, and leaves it with the block.

    `within`: the beginning of a command that runs the rest of it elsewhere, such as in another network, where its
    address is `address`.
    """
    raylet = stage.named("raylet")[0]
    command = [
        *within, sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--log-style", "record",
        "--address", _argument(raylet, "--gcs-address"),
        "--node-ip-address", address or _argument(raylet, "--node_ip_address"),
        "--num-cpus", "4", "--num-gpus", "0", "--object-store-memory", str(_OBJECT_STORE_BYTES),
    ]  # fmt: skip
    joined = subprocess.Popen(command, env=_environment(raylet), stdout=subprocess.DEVNULL, start_new_session=True)
    stage.nodes.append(joined.pid)
    member = Node(stage, joined.pid)
    try:
        yield member
    finally:
        joined.terminate()
        try:
            joined.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            member.kill()
            joined.wait()
        stage.nodes.remove(joined.pid)


def _argument(raylet: int, name: str) -> str:
    for argument in Path(f"/proc/{raylet}/cmdline").read_text().split("\0"):
        if argument.startswith(f"{name}="):
            return argument.removeprefix(f"{name}=")
    raise BenchmarkError(f"the service's raylet was started without {name}: is this another version of Ray?")


def _environment(raylet: int) -> dict[str, str]:
    """That of the first node: Serve reads it on each, and so does whoever has to prove that it may join."""
    entries = Path(f"/proc/{raylet}/environ").read_bytes().split(b"\0")
    pairs = (entry.partition(b"=") for entry in entries if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}
