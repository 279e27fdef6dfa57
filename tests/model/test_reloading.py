from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.assembly import Devices, build_sync_engine
from app.config import EngineConfig
from app.errors import InvalidSetup
from tests.fakes import make_request, run_to_end

SLEEPS = Devices(sleep_after_s=1.0)
KV_GIB = 0.25


def config_of(path: Path, **model: str) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"path": str(path), **model}, "cache": {"memory_gib": KV_GIB}})


def resident_gib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def test_a_native_model_gives_its_memory_up_and_has_the_same_tokens_again(demo_path: Path) -> None:
    engine = build_sync_engine(config_of(demo_path), SLEEPS)
    request, again = (make_request(tuple(range(5, 40)), max_tokens=12) for _ in range(2))
    before = run_to_end(engine, request).token_ids[request.request_id]
    awake = resident_gib()
    engine.sleep()
    assert awake - resident_gib() > KV_GIB
    engine.wake()
    assert run_to_end(engine, again).token_ids[again.request_id] == before


def test_what_cannot_give_its_weights_up_is_refused_with_the_reason(demo_path: Path) -> None:
    with pytest.raises(InvalidSetup, match="runs on transformers' code, which keeps its weights"):
        build_sync_engine(config_of(demo_path, backend="torch"), SLEEPS)
