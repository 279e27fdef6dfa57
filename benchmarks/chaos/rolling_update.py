"""Row R13: an operator updates the service while streams run."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.chaos.stage import RECOVERY_TIMEOUT_S, Size, Stage, application, under_traffic
from benchmarks.chaos.traffic import MODEL_NAME, Traffic
from benchmarks.chaos.verdict import judged_row
from benchmarks.harness.command import BenchmarkError, tell
from benchmarks.harness.machine import PROJECT
from benchmarks.harness.service import Service

_BEFORE_S = 2.0
_AFTER_S = 3.0
_LOOK_S = 0.2
_ASK_S = 1.0  # pause between questions to Serve, each of which starts a program
_GIVEN_UP_S = 300.0  # long, because Serve retries a replica that fails


async def change_under_load(size: Size) -> list[dict[str, Any]]:
    """R13: `serve deploy` with fewer replicas, then with other settings (which restarts all processes), then with
    several models that cannot be loaded, each followed by the working settings.
    """

    def has_scaled(old: set[int], now: set[int]) -> bool:
        return len(now) == 3  # two replicas and the ingress

    def has_rolled(old: set[int], now: set[int]) -> bool:
        return len(now) == 4 and not old & now

    async with under_traffic(size, with_dashboard=True) as (running, traffic):
        two_replicas, works = {f"replica-{MODEL_NAME}": 2}, application(place_timeout_s=20.0)
        scale_down = partial(running.running.deploy, application(), num_replicas=two_replicas)
        update = partial(running.running.deploy, works)
        text = "rolling update of replicas and ingress to other settings, 2 replicas to 3"
        return [
            await _changing(running, traffic, "scale-down from 3 replicas to 2", scale_down, has_scaled),
            await _changing(running, traffic, text, update, has_rolled),
            *[
                row
                for text, fails, num_left in _FAILURES
                for row in await _failing_update(running, traffic, works, text, fails, num_left=num_left)
            ],
        ]


def cut_off_model(folder: Path, model: Path = PROJECT / "models" / "demo") -> str:
    """Copy a model into a folder, truncate the weights of the copy, and return the path of the copy."""
    shutil.copytree(model, folder / "model")
    weights = folder / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    return str(folder / "model")


def _cut_off(folder: Path, **settings: Any) -> dict[str, Any]:
    return application(place_timeout_s=20.0, model=cut_off_model(folder), weights=True, **settings)


def _no_folder(folder: Path) -> dict[str, Any]:
    return application(place_timeout_s=20.0, model=str(folder / "none"), weights=True)


def _too_little_memory(folder: Path) -> dict[str, Any]:
    return application(place_timeout_s=20.0, weights=True, cache={"num_blocks": 10**9})


def _broken_adapter(folder: Path) -> dict[str, Any]:
    """Return an application with an adapter that has a valid config and invalid weights."""
    (folder / "adapter_config.json").write_text('{"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}')
    (folder / "adapter_model.safetensors").write_bytes(b"none")
    return application(place_timeout_s=20.0, weights=True, adapters={"broken": str(folder)})


# The failure, the settings to deploy, and how many of the three old replicas keep serving.
_FAILURES: list[tuple[str, Callable[[Path], dict[str, Any]], int]] = [
    ("weights that are cut off, max_surge_percent 0", partial(_cut_off, max_surge_percent=0), 2),
    ("weights that are cut off, max_surge_percent 34", partial(_cut_off, max_surge_percent=34), 3),
    ("a folder that is not there", _no_folder, 2),
    ("more KV memory than the machine has", _too_little_memory, 2),
    ("an adapter without weights", _broken_adapter, 2),
]


def deploy(service: Service, settings: dict[str, Any], wanted: str) -> None:
    """Deploy an application and wait until Serve reports the wanted status. Raises BenchmarkError after 300 s."""
    service.deploy(settings)
    deadline = time.monotonic() + _GIVEN_UP_S
    while (status := service.status()) != wanted:
        if time.monotonic() > deadline:
            raise BenchmarkError(f"an update: {status} after {_GIVEN_UP_S:.0f} s, not {wanted}")
        time.sleep(_ASK_S)


async def _failing_update(
    running: Stage,
    traffic: Traffic,
    works: dict[str, Any],
    text: str,
    fails: Callable[[Path], dict[str, Any]],
    *,
    num_left: int,
) -> list[dict[str, Any]]:
    """Deploy an update that fails, wait until Serve gives up, and then deploy the working settings again."""
    with tempfile.TemporaryDirectory() as folder:
        failed = await _changing(
            running,
            traffic,
            f"update to {text}",
            partial(deploy, running.running, fails(Path(folder)), "DEPLOY_FAILED"),
            lambda old, now: len(old & set(running.replicas())) == num_left,
        )
        back = await _changing(
            running,
            traffic,
            f"back from {text}",
            partial(deploy, running.running, works, "RUNNING"),
            lambda old, now: len(running.replicas()) == 3,
        )
    return [failed, back]


async def _changing(
    running: Stage,
    traffic: Traffic,
    fault: str,
    change: Callable[[], None],
    is_done: Callable[[set[int], set[int]], bool],
) -> dict[str, Any]:
    fresh = replace(traffic, answers=[])
    async with fresh.flowing():
        await asyncio.sleep(_BEFORE_S)
        old = _processes(running)
        began_s = time.perf_counter()
        await asyncio.to_thread(change)
        while not is_done(old, _processes(running)):
            if time.perf_counter() - began_s > RECOVERY_TIMEOUT_S:
                raise BenchmarkError(f"{fault}: not done within {RECOVERY_TIMEOUT_S:.0f} s")
            await asyncio.sleep(_LOOK_S)
        seconds = time.perf_counter() - began_s
        tell(f"R13: {fault}: {seconds:.1f} s")
        await asyncio.sleep(_AFTER_S)
    failed = {"failed_requests": sum(not each.is_complete for each in fresh.answers)}
    return await judged_row(
        {"row": "R13", "fault": fault, "took_s": round(seconds, 1)}, running, fresh, [began_s], failed
    )


def _processes(running: Stage) -> set[int]:
    return {*running.replicas(), *running.ingresses()}
