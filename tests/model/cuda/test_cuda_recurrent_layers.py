"""Models with recurrent layers on the kernels for GPUs, through the loader; `test_triton_attention.py` says where."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from app.build import build_sync_engine
from app.config import CacheConfig, EngineConfig
from app.engine.engine import Engine
from app.errors import InvalidSetup
from app.model import loader
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.implementations.transformers_code import TransformersModel
from app.model.kv_cache import LayerShape, num_blocks_that_fit
from app.model.memory import state_bytes
from app.model.planned_memory import planned_gpu_model, planned_memory
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import DEVICE, config_of, generate_plainly
from tests.model.test_recurrent_layers import DELTA, HYBRIDS
from tests.tiny_models import save_random_model

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

# The interpreter takes a millisecond for a token of a head.
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": HYBRIDS["lfm2"],
    "qwen3_5_text": {**DELTA, "linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_value_head_dim": 24},
    "granitemoehybrid": {**HYBRIDS["granitemoehybrid"], "mamba_n_heads": 2, "mamba_d_head": 64, "mamba_d_state": 5},
    "falcon_mamba": {"state_size": 5, "time_step_rank": 4},  # recurrent layers alone
}


def config_for(path: Path, *, chunk: int = 3, **cache: Any) -> EngineConfig:
    return config_of(
        path, device=DEVICE.type, dtype="float32", cache={"block_size": 4, **cache},
        scheduler={"max_running": 3, "max_step_tokens": 8, "prefill_chunk_tokens": chunk},
    )  # fmt: skip


def build(path: Path, *, chunk: int) -> Engine:
    return build_sync_engine(config_for(path, chunk=chunk, num_blocks=12))


@pytest.mark.usefixtures("triton_here")
@pytest.mark.parametrize(
    ("model_type", "chunk"),
    [("lfm2", 3), ("lfm2", 7), ("qwen3_5_text", 3), ("granitemoehybrid", 5), ("falcon_mamba", 3)],
)
def test_tokens_are_those_of_generate_at_any_chunking(
    model_type: str, chunk: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = save_random_model(tmp_path, model_type, **MODELS[model_type])
    requests = [
        make_request(tuple(range(first, first + length)), max_tokens=3, ignore_eos=True, temperature=0.0)
        for first, length in ((3, 9), (40, 1))
    ]
    expected = generate_plainly(path, requests)
    with caplog.at_level(logging.INFO):
        engine = build(path, chunk=chunk)
    assert isinstance(engine.runner, GraphModelRunner)
    assert "steps run without CUDA graphs" in caplog.text
    assert run_to_end(engine, *requests).token_ids == expected
    assert run_to_end(engine, requests[0]).token_ids[requests[0].request_id] == expected[requests[0].request_id]
    assert engine.stats().total_cached_tokens > 0, "it goes on from a snapshot"


@pytest.mark.parametrize("model_type", MODELS)
def test_the_plan_of_a_gpu_has_the_slots_of_the_states(model_type: str, tmp_path: Path) -> None:
    path = save_random_model(tmp_path, model_type, **MODELS[model_type])
    config = config_for(path)
    model, planned = planned_gpu_model(config, dtype=torch.float32), planned_memory(config)
    assert isinstance(model, TransformersModel)
    assert planned.state_bytes == state_bytes(model.states) > 0
    assert planned.needs.graphs == 0, "its steps run without CUDA graphs"
    for memory_bytes, num_slots in ((1000 * planned.state_bytes, 4 * 3), (18 * planned.state_bytes, 9), (0, 8)):
        assert planned.num_slots(config, memory_bytes) == num_slots


def test_slots_and_blocks_share_what_a_gpu_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_random_model(tmp_path, "qwen3_5_text", **MODELS["qwen3_5_text"])
    config = config_for(path)
    model, of_block = planned_gpu_model(config, dtype=torch.float32), planned_memory(config).block_bytes
    of_state = state_bytes(model.states)
    left = 20 * of_state + 7 * of_block
    with_slots, num_bytes = loader._with_state_slots(config, model, left)
    assert with_slots.model_info.num_state_slots == 10
    assert num_bytes == 10 * of_state
    with pytest.raises(InvalidSetup, match=r"gpu_memory_fraction=0\.9 leaves 0\.000 GiB: 8 slots of 0\.0 MiB .* need"):
        loader._with_state_slots(config, model, of_state)


@pytest.mark.usefixtures("triton_here")
def test_slots_are_as_many_as_were_counted(tmp_path: Path) -> None:
    path = save_random_model(tmp_path, "lfm2", **MODELS["lfm2"])
    engine = build_sync_engine(config_for(path, num_blocks=12))
    assert isinstance(engine.runner, GraphModelRunner)
    assert {states.shape[0] for states in engine.runner._states} == {4 * 3}


def test_blocks_without_layers_are_sized_by_the_memory_of_the_host() -> None:
    cache = CacheConfig(block_size=4, memory_gib=0.25)
    found = num_blocks_that_fit(cache, {}, dtype=torch.float32, gpu_bytes=2**36, taken_bytes=2**35)
    assert found == num_blocks_that_fit(cache, {}, dtype=torch.float32)
    layers = {0: LayerShape(num_kv_heads=1, key_dim=8, value_dim=8)}
    assert num_blocks_that_fit(cache, layers, dtype=torch.float32, gpu_bytes=2**20) == 2**20 // (4 * 16 * 4)
    with pytest.raises(InvalidSetup, match=r"gpu_memory_fraction=0\.9 leaves .* next to 1\.000 GiB for states"):
        num_blocks_that_fit(cache, layers, dtype=torch.float32, gpu_bytes=2**20, taken_bytes=2**30)
