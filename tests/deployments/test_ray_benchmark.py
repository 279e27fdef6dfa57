"""Ray's own benchmark of OpenAI-compatible servers against the live service, as `make clients` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.clients.__main__ import check
from benchmarks.clients.environments import CLIENTS
from tests.deployments.conftest import Service


def test_rays_own_benchmark_completes_what_it_asks(service: Service, demo_path: Path) -> None:
    """24 requests in conversations; `make clients` does more, and every process that imports Ray takes seconds."""
    [client] = [client for client in CLIENTS if client.package == "ray"]
    python = Path(sys.executable)
    outcome = check(client, python, service.url, model="turns", folder=demo_path, only=["conversations"])
    assert outcome.has_passed, outcome.problems
    assert outcome.num_checks == 1
