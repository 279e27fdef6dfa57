"""A Ray cluster for one run alone, on this machine.

Ray 2.60 has every cluster's agent, through which jobs begin, listen on port 52365; where that is taken, the cluster
runs without one and no job ever begins. `ray start` has an option for the port, `ray.init` has none.
"""

from __future__ import annotations

import math
import os
from functools import partial
from pathlib import Path
from typing import Any

import ray
import yaml
from ray._private import parameter
from ray.serve._private.api import _create_controller_and_proxy_refs
from ray.serve._private.client import ServeControllerClient
from ray.serve._private.constants import HTTP_PROXY_TIMEOUT
from ray.serve.config import ControllerOptions, gRPCOptions
from ray.serve.context import _set_global_client
from ray.serve.schema import ServeDeploySchema

_ANY_FREE_PORT = 0


def start_own_cluster(*, num_cpus: int, **options: Any) -> None:
    """`ray.init` for a cluster that joins none, and that is in the way of none, that runs here.

    `options` are those of `ray.init`.
    """
    of_all_clusters = parameter.RayParams
    parameter.RayParams = partial(
        of_all_clusters, dashboard_agent_listen_port=_ANY_FREE_PORT, no_monitor=True, include_log_monitor=False
    )
    try:
        ray.init(address="local", num_cpus=num_cpus, log_to_driver=False, logging_level="ERROR", **options)
    finally:
        parameter.RayParams = of_all_clusters


def deploy(path: Path) -> None:
    """As `serve run --non-blocking` deploys a config file, but without waiting for the proxies before it.

    The application is built, and its replicas start, while the proxies start.
    """
    config = ServeDeploySchema.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    controller, starting_proxies = _create_controller_and_proxy_refs(
        http_options=config.http_options.model_dump(),
        grpc_options=gRPCOptions(**config.grpc_options.model_dump()),
        global_logging_config=None,
        global_tracing_config=None,
        controller_options=config.controller_options or ControllerOptions(),
        proxy_location=config.proxy_location,
    )
    client = ServeControllerClient(controller)
    _set_global_client(client)
    client.deploy_apps(config, _blocking=False)
    ray.get(starting_proxies, timeout=HTTP_PROXY_TIMEOUT)


def num_cpus_for(reserved: float) -> int:
    """The CPUs of a cluster that has to have room for so many.

    A reservation is a number, not a core: a machine with fewer cores does the same, only slower.
    """
    return max(os.cpu_count() or 1, math.ceil(reserved))
