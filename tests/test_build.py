from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.build import build_sync_engine
from app.config import CacheConfig, EngineConfig, ModelConfig
from app.errors import InvalidSetup
from app.model.cpu.decoder import NativeDecoder
from app.model.cpu.library import is_fast
from tests.tiny_models import save_tiny_model


def config(path: Path, **model: object) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(path=str(path), device="cpu", dtype="float32", **model),  # type: ignore[arg-type]
        cache=CacheConfig(num_blocks=8),
    )


def test_batch_invariance_is_promised_only_where_it_holds(tmp_path: Path) -> None:
    phi = save_tiny_model("phi3", tmp_path / "phi3")
    build_sync_engine(config(phi))
    with pytest.raises(InvalidSetup, match=r"batch_invariant is set, but .*phi3 on cpu runs on transformers' code"):
        build_sync_engine(config(phi, batch_invariant=True))


def test_a_known_model_is_batch_invariant_on_a_cpu(tmp_path: Path) -> None:
    if not is_fast(torch.float32):
        pytest.skip("no C++ compiler here, or a CPU without wide vectors")
    engine = build_sync_engine(config(save_tiny_model("llama", tmp_path / "llama"), batch_invariant=True))
    assert type(engine.runner.forward) is NativeDecoder  # type: ignore[attr-defined]
