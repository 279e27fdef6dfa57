from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from app.build import build_sync_engine
from app.config import ReplicasConfig
from app.errors import InvalidSetup
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import config_of
from tests.lora import save_adapter
from tests.tiny_models import build_tiny_model

SLEEPS = ReplicasConfig(sleep_after_s=1.0)
KV_GIB = 0.25
KV = {"memory_gib": KV_GIB}


def resident_gib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**30


def test_a_native_model_gives_its_memory_up_and_has_the_same_tokens_again(demo_path: Path) -> None:
    engine = build_sync_engine(config_of(demo_path, cache=KV), SLEEPS)
    request, again = (make_request(tuple(range(5, 40)), max_tokens=12) for _ in range(2))
    before = run_to_end(engine, request).token_ids[request.request_id]
    awake = resident_gib()
    engine.sleep()
    assert awake - resident_gib() > KV_GIB
    engine.wake()
    assert run_to_end(engine, again).token_ids[again.request_id] == before


def test_adapters_are_unloaded_in_sleep_and_may_be_loaded_while_it_lasts(tmp_path: Path) -> None:
    build_tiny_model("llama").save_pretrained(tmp_path / "base")
    adapter = save_adapter(tmp_path / "adapter", build_tiny_model("llama"))
    engine = build_sync_engine(config_of(tmp_path / "base", cache=KV), SLEEPS)
    assert engine.adapters is not None
    requests = [replace(make_request((5, 6, 7), max_tokens=6), adapter=adapter) for _ in range(2)]
    before = run_to_end(engine, requests[0]).token_ids[requests[0].request_id]
    engine.sleep()
    assert engine.adapters.stats().loaded == ()
    engine.add(requests[1])
    assert engine.adapters.stats().loaded == (adapter.digest,)
    engine.wake()
    assert run_to_end(engine).token_ids[requests[1].request_id] == before


def test_what_cannot_give_its_weights_up_is_refused_with_the_reason(demo_path: Path) -> None:
    with pytest.raises(InvalidSetup, match="runs on transformers' code, which cannot release its weights"):
        build_sync_engine(config_of(demo_path, cache=KV, backend="torch"), SLEEPS)
