"""Which panels of Ray's own Serve and LLM boards have data of a service under light load: one JSON object.

    python -m benchmarks.service.ray_boards --seconds 60

Debian's Prometheus scrapes Ray's metrics agent, as the boards need it. The queries are those of the installed ray
package, with every variable at "all". The service is the one of `benchmarks.chaos`, with simulated replicas.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.chaos.stage import LENGTHS, Stage, application, stage
from benchmarks.chaos.traffic import Traffic, mixed
from benchmarks.harness.command import BenchmarkError, command_parser, positive, run_command, tell
from benchmarks.harness.prometheus import Prometheus, prometheus

_SESSION = re.compile(rb"--raylet_socket_name=([^\0]+)/sockets/raylet")
_METRIC = re.compile(r"\b(?:ray|autoscaler)_\w+")
_NUM_CLIENTS = 8
_EVERY_S = 2


def boards() -> dict[str, dict[str, list[str]]]:
    """The queries of Ray's panels, by the board's name and the panel's title."""
    from ray.dashboard.modules.metrics.dashboards.serve_dashboard_panels import serve_dashboard_config
    from ray.dashboard.modules.metrics.dashboards.serve_deployment_dashboard_panels import (
        serve_deployment_dashboard_config,
    )
    from ray.dashboard.modules.metrics.dashboards.serve_llm_dashboard_panels import serve_llm_dashboard_config

    found = {}
    for board in (serve_dashboard_config, serve_deployment_dashboard_config, serve_llm_dashboard_config):
        panels = [*(board.panels or ()), *(panel for row in board.rows or () for panel in row.panels)]
        found[board.name] = {panel.title: [for_all(target.expr) for target in panel.targets] for panel in panels}
    return found


def for_all(expr: str) -> str:
    """A query of Ray's as Grafana sends it when nothing is chosen."""
    whole = expr.format(global_filters='SessionName=~".*"').replace("[$interval]", "[1m]")
    return re.sub(r"\$\w+", ".*", whole)


def _agent(running: Stage) -> str:
    """Where Ray's metrics agent answers. Its port is in a file of Ray's session."""
    for pid in running.processes():
        try:
            found = _SESSION.search(Path(f"/proc/{pid}/cmdline").read_bytes())
        except OSError:
            continue
        if found is not None:
            (port,) = Path(found[1].decode()).glob("metrics_export_port_*")
            return f"http://127.0.0.1:{int(port.read_text())}"
    raise BenchmarkError("the service has no raylet, of which the folder of Ray's session is known")


async def _under_load(seconds: int) -> dict[str, Any]:
    with stage(application()) as running, prometheus(_agent(running), factor=1, every_s=_EVERY_S) as server:
        async with Traffic(running.target, mixed(_NUM_CLIENTS, max_tokens=LENGTHS), {}).flowing():
            await asyncio.sleep(seconds)
            return {name: _filled(server, panels) for name, panels in boards().items()}


def _filled(server: Prometheus, panels: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    with_data = [title for title, exprs in panels.items() if any(map(server.has_number, exprs))]
    empty = {title: _absent(server, exprs) for title, exprs in panels.items() if title not in with_data}
    tell(f"{len(with_data)} of {len(panels)} panels have data; empty: {empty}")
    return {"num_panels": len(panels), "with_data": with_data, "empty": empty}


def _absent(server: Prometheus, exprs: Iterable[str]) -> list[str]:
    """The metrics of a panel that are not there at all."""
    names = {name for expr in exprs for name in _METRIC.findall(expr)}
    return sorted(name for name in names if not server.query(f'{{__name__=~"{name}.*"}}'))


def _measure(given: argparse.Namespace) -> dict[str, Any]:
    return asyncio.run(_under_load(given.seconds))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = command_parser("service.ray_boards", __doc__)
    parser.add_argument("--seconds", type=positive, default=60, metavar="N", help="load before the panels are asked")
    return run_command(parser, _measure, arguments)


if __name__ == "__main__":
    sys.exit(main())
