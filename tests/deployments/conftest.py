"""One Ray cluster for all tests here, and one application on it with a model for each thing to show.

The environment is the launcher's own, set before Ray is imported anywhere: Ray and Serve read it then.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deployments.launcher import environment, free_ports
from deployments.settings import ServeFile, parse

HERE = Path(__file__).parent
PLAIN_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def free_port() -> int:
    return next(free_ports())


HTTP_PORT = free_port()
RUN_FOLDER = Path(tempfile.mkdtemp(prefix="carousel-", dir="/tmp"))
atexit.register(shutil.rmtree, RUN_FOLDER, ignore_errors=True)
_FILE = ServeFile(host="127.0.0.1", port=HTTP_PORT, applications={})
_TESTS_ONLY = {
    "RAY_AUTH_MODE": "disabled",
    # Time for HAProxy to hear that an ingress goes; by default it is 30 s, and every test that deploys would take them.
    # 1 s was too short on a machine that had much else to do: connections were refused.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
    "RAY_SERVE_PORT_QUARANTINE_S": "0",
}
os.environ.update(environment(_FILE, RUN_FOLDER, PLAIN_ENVIRONMENT) | _TESTS_ONLY)
with warnings.catch_warnings():
    # Ray 2.60 declares its pydantic fields in a way that pydantic 2.14 calls deprecated; only while it is imported.
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field`")
    import ray
    from ray import serve


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.serve)


@dataclass(frozen=True, slots=True)
class Service:
    """The running application, as its clients and its operator see it."""

    url: str

    def stats(self, model: str) -> list[Any]:
        """EngineStats of each replica of a model, always in the same order while the replicas are the same."""
        return list(_handle(model).broadcast("stats").results(timeout_s=10))

    def eventually(self, model: str, condition: Callable[[list[Any]], bool], timeout_s: float = 10.0) -> list[Any]:
        """The stats once they meet the condition."""
        deadline = time.monotonic() + timeout_s
        while not condition(stats := self.stats(model)):
            assert time.monotonic() < deadline, f"not within {timeout_s} s; at last: {stats}"
            time.sleep(0.01)
        return stats


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A Ray cluster that nothing else uses; gives the address of its HTTP proxy. Its dashboard runs jobs."""
    ray.init(
        address="local",
        namespace="serve",
        num_cpus=2,
        include_dashboard=True,
        dashboard_port=free_port(),
        log_to_driver=False,
        logging_level="ERROR",
        _temp_dir=str(RUN_FOLDER),
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": HTTP_PORT})
        yield f"http://127.0.0.1:{HTTP_PORT}"
        serve.shutdown()
    finally:
        ray.shutdown()
        deadline = time.monotonic() + 5
        while RUN_FOLDER.exists() and time.monotonic() < deadline:  # those who are ending still write there
            shutil.rmtree(RUN_FOLDER, ignore_errors=True)


@pytest.fixture(scope="session")
def service(cluster: str, demo_path: Path) -> Service:
    """`turns` and `least` have two replicas, dispatched in turn and by load; `narrow` takes two requests in all.

    The last two compute on plain torch: in native code a stream of all the context is over before a test has looked.
    """
    from deployments.application import build

    models = [
        _model("turns", demo_path, num_replicas=2, dispatch="round_robin"),
        _model("least", demo_path, num_replicas=2, dispatch="least_loaded", is_slow=True),
        _model(
            "narrow", demo_path, num_replicas=1, dispatch="least_loaded", is_slow=True, max_running=1, max_waiting=1
        ),
    ]
    cascades = [{"name": "unsure", "small": "turns", "large": "least", "min_mean_logprob": 0}]
    args = {"models": models, "cascades": cascades, "ingress": {"num_cpus": 0.1}}
    serve.run(build(parse(args)), name="carousel", route_prefix="/")
    service = Service(url=cluster)
    for model in ("turns", "least", "narrow"):
        service.stats(model)  # the first call takes longer, and tests of one moment cannot wait
    return service


def _model(
    name: str, path: Path, *, num_replicas: int, dispatch: str, is_slow: bool = False, **scheduler: int
) -> dict[str, Any]:
    plain = {"native_decoder": False, "native_attention": False, "packed_weights": False} if is_slow else {}
    return {
        "name": name,
        "engine": {"model": {"path": str(path)} | plain, "cache": {"memory_gib": 0.05}, "scheduler": scheduler},
        "replicas": {"num_replicas": num_replicas, "num_cpus": 0.1, "dispatch": dispatch, "drain_timeout_s": 1},
    }


def _handle(model: str) -> Any:
    handle = serve.get_deployment_handle(f"replica-{model}", "carousel")
    if not handle.is_initialized:
        # In throughput mode a handle wants the caller's event loop; tests have none.
        handle._init(_run_router_in_separate_loop=True)
    return handle
