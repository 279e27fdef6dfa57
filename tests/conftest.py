"""Fixtures for all tests. Nothing here needs a network or a GPU."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import os
import shutil
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")  # no property depends on what else the machine does

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
if "PYTEST_XDIST_WORKER" in os.environ:
    # Several processes share the cores: torch's threads, which wait in busy loops, would take them from one another.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    # Triton reads it when it is imported: without a GPU its kernels run in its interpreter, on the CPU.
    os.environ.setdefault("TRITON_INTERPRET", "1")

PROJECT = Path(__file__).resolve().parent.parent

# Every client of HTTP reads the certificates of this machine anew, which takes longer than most tests.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]

gc.disable()  # while modules are imported, of which nothing is garbage


NOT_LIVE = tuple(
    f"tests/deployments/{name}"
    for name in (
        "plan/", "bulk/", "dashboards/", "launcher/test_trial.py", "serve/test_keys_file.py", "serve/test_process.py",
        "test_plan.py", "test_request_path.py",
    )
)  # fmt: skip


ON_A_REAL_MODEL = ("tests/benchmarks/engine/test_bench_quality.py", "tests/test_smollm2.py")  # made once for both


def _piece_of_work(nodeid: str) -> str:
    """What one of several processes takes: all files with live tests, which share a cluster, or a file."""
    file = nodeid.partition("::")[0]
    if file in ON_A_REAL_MODEL:
        return "real model"
    has_live = file.startswith("tests/deployments/") and not file.startswith(NOT_LIVE)
    return "live" if has_live or file == "tests/test_wheel.py" else file


STAYING = ("cluster", "shared", "service")  # fixtures, whose processes compute all the time, a hundredth of a core each


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest piece of work comes first. In it the files that leave no processes come before those that do."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        left: dict[Path, int] = {}
        for item in items:
            names = getattr(item, "fixturenames", ())
            number = max((at for at, name in enumerate(STAYING, start=1) if name in names), default=0)
            left[item.path] = max(left.get(item.path, 0), number)

        def place(item: pytest.Item) -> tuple[bool, bool, int]:
            is_live = _piece_of_work(item.nodeid) == "live"
            return not is_live, item.get_closest_marker("serve") is not None, left[item.path] if is_live else 0

        items.sort(key=place)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `--dist loadfile`. Groups of xdist would do, but 3.8 marks them where pytest 9.2 does not look."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _piece_of_work(nodeid)

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Files without Ray step back, so that the live tests are not the last to end: processes of Ray that wait compute,
    too. A third of the others' weight is left to them, with which they end beside busy loops."""
    if "PYTEST_XDIST_WORKER" in os.environ and _piece_of_work(item.nodeid) != "live" and os.nice(0) == 0:
        os.nice(5)


def pytest_collection_finish() -> None:
    """What is loaded stays, and no later collection looks at it: torch and transformers are 700,000 objects."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop of its own, which its `loop_factory` may make."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    with asyncio.Runner(loop_factory=pyfuncitem.funcargs.get("loop_factory")) as runner:
        runner.run(pyfuncitem.obj(**given))
    return True


@pytest.fixture(scope="session")
def num_threads() -> int:
    """Of torch, in every test."""
    import torch

    return torch.get_num_threads()


@pytest.fixture(autouse=True)
def same_number_of_threads(num_threads: int) -> None:
    """Loading a model sets it, and the bits of a product depend on it."""
    import torch

    torch.set_num_threads(num_threads)


@pytest.fixture(scope="session", autouse=True)
def engines_of_one_thread() -> Iterator[None]:
    """Unless a test asks for more. By default they have one for each core, and those that wait for others compute."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("app.build", "app.model.loader"):
            patch.setattr(f"{module}.num_cores", lambda: 1)
        yield


@pytest.fixture(scope="session")
def demo_path() -> Path:
    """The bundled model."""
    return PROJECT / "models" / "demo"


@pytest.fixture(scope="session")
def smollm2_file() -> Path:
    """A real model's GGUF file, where `make serve MODEL=smollm2` has fetched it; other machines skip the test."""
    from deployments.launcher.trial import kept_file

    file = kept_file("smollm2")
    if not file.is_file():
        pytest.skip(f"there is no {file}; `make serve MODEL=smollm2` fetches it")
    return file


@pytest.fixture(scope="session")
def smollm2_path(smollm2_file: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with the numbers of that file in float32, whose products round no inputs."""
    from app.model.gguf.checkpoint import checkpoint_of
    from tests.model.gguf.files import read_gguf

    cache, folder = tmp_path_factory.mktemp("described"), tmp_path_factory.mktemp("smollm2")
    read_gguf(smollm2_file, cache).save_pretrained(folder)
    for path in checkpoint_of(smollm2_file, cache).glob("*token*"):
        shutil.copy(path, folder)
    for path in checkpoint_of(smollm2_file, cache).glob("*.jinja"):
        shutil.copy(path, folder)
    return str(folder)


@pytest.fixture(scope="module")
def small_lengths() -> Iterator[None]:
    """The constants of policies and strategies, scaled down to requests of some ten tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.engine.policies.AGEING_TOKENS_PER_S", 100.0)
        patch.setattr("app.engine.policies.MAX_OVERTAKING_S", 0.3)
        patch.setattr("app.engine.policies.AGEING_S", 0.05)
        patch.setattr("app.engine.strategies.PREFILL_STEPS", 1)
        patch.setattr("app.engine.strategies.SHORTEST_CLASS_TOKENS", 4)
        yield
