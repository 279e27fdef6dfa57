"""The real service in processes of its own, started as `make serve` starts it, on a port of its own."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.errors import BenchmarkError
from benchmarks.http_call import Target
from benchmarks.processes import Process, family

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
_PROJECT = Path(__file__).resolve().parent.parent
_PORTS = range(20_000, 30_000)  # neither the kernel nor Ray takes ports from here by itself


@dataclass(frozen=True, slots=True)
class Service:
    """A running service."""

    target: Target
    pid: int  # of the launcher, which everything else comes from

    def processes(self) -> dict[int, Process]:
        """All of it: launcher, driver, Ray's own processes, controller, proxy, ingresses, replicas."""
        return family(self.pid)


@contextmanager
def service(application: Mapping[str, Any]) -> Iterator[Service]:
    """Serve an application (`args` of a Serve config file) until the end of the block; what it prints goes to stderr.

    Raises:
        BenchmarkError: it does not start; its own words are on stderr.
    """
    port = _free_port()
    with tempfile.TemporaryDirectory(prefix="carousel-benchmark-") as folder:
        config = Path(folder) / "serve.json"
        config.write_text(json.dumps(_serve_file(application, port)), encoding="utf-8")  # JSON is YAML
        paths = [str(_PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        launcher = subprocess.Popen(
            [sys.executable, "-m", "deployments.launcher", str(config)],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
            stdout=sys.stderr,
        )
        try:
            with _ended_by_exception():
                _wait_until_ready(launcher, port)
                yield Service(Target.parse(f"http://127.0.0.1:{port}"), launcher.pid)
        finally:
            launcher.terminate()
            launcher.wait(STOP_TIMEOUT_S)


@contextmanager
def _ended_by_exception() -> Iterator[None]:
    """SIGTERM raises SystemExit meanwhile: whoever ends this process must not leave the service behind."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _serve_file(application: Mapping[str, Any], port: int) -> dict[str, Any]:
    """As deployments/serve.yaml, with another application."""
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": "127.0.0.1", "port": port},
        "logging_config": {"log_level": "INFO", "enable_access_log": False},
        "applications": [
            {
                "name": "carousel",
                "route_prefix": "/",
                "import_path": "deployments.application:build",
                "args": dict(application),
            }
        ],
    }


def _wait_until_ready(launcher: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if launcher.poll() is not None:
            raise BenchmarkError(f"the service did not start: its launcher ended with status {launcher.returncode}")
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as response:
                if response.status == 200:
                    return
        except (OSError, urllib.error.URLError):
            pass
        time.sleep(0.25)
    raise BenchmarkError(f"the service was not ready after {START_TIMEOUT_S:.0f} s")


def _free_port() -> int:
    for port in random.sample(_PORTS, len(_PORTS)):
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise BenchmarkError(f"no port from {_PORTS.start:,} to {_PORTS.stop - 1:,} is free")
