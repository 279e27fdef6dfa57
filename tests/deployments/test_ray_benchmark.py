"""Ray's own benchmark of OpenAI-compatible servers against the live service, as `make clients` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

from benchmarks.clients.__main__ import check
from benchmarks.clients.client import CLIENTS
from tests.deployments.conftest import Service


def test_rays_own_benchmark_completes_what_it_asks(service: Service, demo_path: Path) -> None:
    [client] = [client for client in CLIENTS if client.package == "ray"]
    outcome = check(client, Path(sys.executable), service.url, model="turns", folder=demo_path)
    assert outcome.has_passed, outcome.problems
    assert outcome.num_checks == 3
