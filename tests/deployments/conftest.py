"""One Ray cluster for all tests here, and two applications on it with a model for each thing to show.

The environment is the launcher's own, set before Ray is imported anywhere: Ray and Serve read it then.
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from deployments.launcher.supervisor import environment, free_ports
from deployments.serve.settings import ServeFile, parse
from tests.tiny_encoders import save_tiny_encoder
from tests.waiting import PATIENCE_S, eventually

HERE = Path(__file__).parent
STARTS_RAY = {"cluster", "hosts", "launch"}  # fixtures
NATIVE: Mapping[str, Any] = {}
STATIC = {"name": "static", "max_wait_ms": 200}  # four times its default: busy machines hide less
TRIAL = (
    {"name": "steady", "share": 3},
    {"name": "bold", "share": 1, "scheduler": {"preset": "latency", "policy": "sjf", "strategy": STATIC}},
)
PLAIN_ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}


def free_port() -> int:
    return next(free_ports())


HTTP_PORT = free_port()
Deployed = Callable[[str, Mapping[str, Any]], AbstractContextManager[str]]
SHARED = "shared"  # the name of the application
RUN_FOLDER = Path(tempfile.mkdtemp(prefix="carousel-", dir="/tmp"))
atexit.register(shutil.rmtree, RUN_FOLDER, ignore_errors=True)
_FILE = ServeFile(host="127.0.0.1", port=HTTP_PORT, applications={})
_TESTS_ONLY = {
    "RAY_AUTH_MODE": "disabled",
    # Time for HAProxy to hear that an ingress goes; by default it is 30 s, and every test that deploys would take them.
    # 1 s was too short on a machine that had much else to do: connections were refused.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "3",
    "RAY_SERVE_PORT_QUARANTINE_S": "0",
    "RAY_SERVE_MAX_PER_REPLICA_RETRY_COUNT": "1",  # by default a replica that cannot start is started three times
}
os.environ.update(environment(_FILE, RUN_FOLDER, PLAIN_ENVIRONMENT) | _TESTS_ONLY)
with warnings.catch_warnings():
    # Ray 2.60 declares its pydantic fields in a way that pydantic 2.14 calls deprecated; only while it is imported.
    warnings.filterwarnings("ignore", message="Using extra keyword arguments on `Field`")
    import deployments.preload  # noqa: F401  # before Serve

    # isort: split
    import ray
    from ray import serve

    from deployments.launcher.own_cluster import start_own_cluster


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents and STARTS_RAY & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.serve)


@dataclass(frozen=True, slots=True)
class Service:
    """The running application, as its clients and its operator see it."""

    url: str

    def stats(self, model: str) -> list[Any]:
        """EngineStats of each replica of a model, always in the same order while the replicas are the same."""
        return list(_handle(model).broadcast("stats").results(timeout_s=PATIENCE_S))

    def eventually(self, model: str, condition: Callable[[list[Any]], bool]) -> list[Any]:
        """The stats once they meet the condition."""
        return eventually(lambda: self.stats(model), condition)

    def until_free(self, model: str) -> None:
        """Until the ingress too knows of no request at the model's replicas: their reports come a moment later."""

        def requests() -> int:
            entries = httpx.get(f"{self.url}/admin/fleet", timeout=PATIENCE_S).json()["data"]
            return sum(each["requests"] for entry in entries if entry["model"] == model for each in entry["replicas"])

        eventually(requests, lambda number: number == 0)


@pytest.fixture(scope="session")
def cluster() -> Iterator[str]:
    """A Ray cluster that nothing else uses; gives the address of its HTTP proxy."""
    start_own_cluster(
        reserved_cpus=8,  # reservations of all applications at once; a number, not cores
        namespace="serve",
        include_dashboard=False,
        _temp_dir=str(RUN_FOLDER),
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": HTTP_PORT})
        yield f"http://127.0.0.1:{HTTP_PORT}"
    finally:
        _end_cluster()


@pytest.hookimpl(trylast=True)  # once what the last file began has ended
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """The cluster ends with the tests of this folder: its processes compute half a core's worth of nothing."""
    if nextitem is None or HERE not in nextitem.path.parents:
        _end_cluster()


def _end_cluster() -> None:
    if not ray.is_initialized():
        return
    serve.shutdown()
    ray.shutdown()
    deadline = time.monotonic() + 5
    while RUN_FOLDER.exists() and time.monotonic() < deadline:  # processes that are ending still write there
        shutil.rmtree(RUN_FOLDER, ignore_errors=True)


@pytest.fixture(scope="session")
def deployed(cluster: str) -> Deployed:
    """Deploys `args` as an application of this name for the length of a block; gives where it answers."""
    from deployments.serve.application import build

    @contextmanager
    def for_a_block(name: str, args: Mapping[str, Any]) -> Iterator[str]:
        serve.run(build(parse(args)), name=name, route_prefix=f"/{name}")
        yield f"{cluster}/{name}"
        if ray.is_initialized():
            # Not waited for: it has its own name, and the next tests have other applications.
            serve.delete(name, _blocking=False)

    return for_a_block


@pytest.fixture(scope="session")
def service(cluster: str, demo_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Service:
    """`turns` and `least` have two replicas, dispatched in turn and by load; `narrow` takes two requests in all.

    `trial` has two groups of one replica each. The last three are simulated: a stream lasts as long on every machine,
    so that it still runs when a test looks. `ranker` is a cross-encoder, `found` a pipeline with it.

    `dozing`, `first`, `second` sleep when they have nothing to do; the last two do not fit together on their device.
    """
    from deployments.serve.application import build

    ranker = tmp_path_factory.mktemp("ranker")
    save_tiny_encoder("bert", ranker, num_labels=1)
    large = {"simulated": {"step_ms": 10, "memory_gib": 6, "wake_ms": 50}}
    models = [
        _model("turns", demo_path, num_replicas=2, dispatch="round_robin"),
        _model("least", demo_path, num_replicas=2, model=steps_of(5)),
        _model("narrow", demo_path, num_replicas=1, model=steps_of(5), max_running=1, max_waiting=1),
        _model("trial", demo_path, num_replicas=2, model=steps_of(1), groups=TRIAL),
        _model("ranker", ranker, num_replicas=1),
        _sleeping(_model("dozing", demo_path, num_replicas=1)),
        *(_sleeping(_model(name, demo_path, num_replicas=1, model=large), 10) for name in ("first", "second")),
    ]
    cascade = {"kind": "cascade", "small": "turns", "large": "least", "min_mean_logprob": 0}
    found = [{"kind": "rerank", "model": "ranker", "top_n": 1}, {"kind": "generate", "model": "turns"}]
    pipelines = [{"name": "unsure", "steps": [cascade]}, {"name": "found", "steps": found}]
    args = {"models": models, "pipelines": pipelines}
    serve.run(build(parse(args)), name="carousel", route_prefix="/")
    service = Service(url=cluster)
    for model in ("turns", "least", "narrow", "trial", "ranker"):
        service.stats(model)  # the first call takes longer, and tests of one moment cannot wait
    return service


@pytest.fixture
def make_replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Makes, on the loop, the deployment's own class around a simulated model, outside of Serve."""
    from app.config import ServedModelConfig
    from deployments.serve import replica as replica_module

    context = SimpleNamespace(rank=SimpleNamespace(rank=0), replica_id=SimpleNamespace(unique_id="r0"))
    monkeypatch.setattr(replica_module.serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(replica_module.ray.util, "get_node_ip_address", lambda: "127.0.0.1")
    monkeypatch.setattr(replica_module, "log_where_serve_does", lambda: None)
    monkeypatch.setattr(replica_module, "keep_calls_on_loopback", lambda: None)
    # Steps that last: the first event is sent before the second token is there.
    engine = {"model": {"path": "models/demo", **steps_of(250)}, "cache": {"num_blocks": 64}}
    built: list[Any] = []

    def make(rank: int = 0, **replicas: Any) -> Any:
        context.rank.rank = rank
        model = ServedModelConfig.model_validate({"name": "demo", "engine": engine, "replicas": replicas})
        built.append(replica_module.Replica(model, []))
        return built[-1]

    yield make
    for each in built:
        each._engine.shutdown()


@pytest.fixture(scope="session")
def adapters(tmp_path_factory: pytest.TempPathFactory, demo_path: Path) -> Path:
    """A folder with two adapters of the bundled model, and one of another base."""
    from transformers import AutoModelForCausalLM

    from tests.lora import save_adapter

    folder = tmp_path_factory.mktemp("adapters")
    model = AutoModelForCausalLM.from_pretrained(demo_path)
    for seed, name in enumerate(("first", "second")):
        save_adapter(folder / name, model, seed=seed, rank=8, size=0.2)
    save_adapter(folder / "wrong", model, targets=("lm_head",))
    return folder


@pytest.fixture(scope="session")
def shared(
    deployed: Deployed, demo_path: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """Two ingresses and batches; a test that kills a process of it waits until another has come.

    `demo` is the bundled model as `make serve` has it, and with an adapter; `switched` has two simulated replicas.
    """
    folder = tmp_path_factory.mktemp("shared")
    args = {
        "models": [
            _model("demo", demo_path, num_replicas=1) | {"adapters": {"first": str(adapters / "first")}},
            _model("switched", demo_path, num_replicas=2, model=steps_of(20)),
        ],
        "ingress": {"num_replicas": 2},
        "batches": {
            "path": str(folder / "batches"),
            "webhooks": {"allowed_networks": ["127.0.0.1/32"]},
        },
    }
    with deployed(SHARED, args) as url:
        yield url


def steps_of(step_ms: float) -> dict[str, Any]:
    """Of an engine's `model`: every step takes this long, and torch is not loaded."""
    return {"simulated": {"step_ms": step_ms}}


def _model(
    name: str, path: Path, *, num_replicas: int, dispatch: str = "least_loaded", model: Mapping[str, Any] = NATIVE,
    groups: Sequence[Mapping[str, Any]] = (), **scheduler: int,
) -> dict[str, Any]:  # fmt: skip
    return {
        "name": name,
        "engine": {"model": {"path": str(path), **model}, "cache": {"memory_gib": 0.05}, "scheduler": scheduler},
        "replicas": {
            "num_replicas": num_replicas,
            "num_cpus": 0.1,
            "dispatch": dispatch,
            "drain_timeout_s": 1,
            "groups": list(groups),
        },
    }


def _sleeping(model: dict[str, Any], device_memory_gib: float | None = None) -> dict[str, Any]:
    device = {} if device_memory_gib is None else {"device_memory_gib": device_memory_gib}
    return model | {"replicas": model["replicas"] | {"sleep_after_s": 0.5} | device}


def _handle(model: str) -> Any:
    handle = serve.get_deployment_handle(f"replica-{model}", "carousel")
    if not handle.is_initialized:
        # In throughput mode a handle wants the caller's event loop; tests have none.
        handle._init(_run_router_in_separate_loop=True)
    return handle
