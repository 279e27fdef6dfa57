"""The memory that is predicted on the meta device, beside what the same work takes on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from app.config import EngineConfig, SchedulerConfig
from app.engine.batch import StepBatch
from app.engine.largest_batch import largest_batch
from app.engine.request import ModelInfo
from app.model.allocated_bytes import AllocatedBytes, num_bytes_of
from app.model.cpu.decoder import buffer_bytes
from app.model.cpu.library import library
from app.model.cuda.attention import TritonAttention
from app.model.cuda.captured_inputs import decode_size, mixed_sizes
from app.model.cuda.launching import NoKernels
from app.model.cuda.sampler import TritonSampler
from app.model.cuda.weights import fuse_weights
from app.model.implementations.cuda_decoder import CudaModel
from app.model.implementations.gpu import with_one_block
from app.model.implementations.loaded_model import LoadedModel
from app.model.implementations.native_decoder import NativeModel
from app.model.implementations.transformers_code import TransformersModel
from app.model.loader import load_runner
from app.model.planned_memory import (
    memory_to_sleep,
    planned_cpu_memory,
    planned_gpu_model,
    planned_memory,
    planned_native_model,
)
from app.model.sampler import Sampler
from tests.kit.models import config_of, load
from tests.model.cpu_allocator import peak_of_cpu
from tests.tiny_models import ARCHITECTURES, build_tiny_model

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

LIMITS = SchedulerConfig(max_running=6, max_step_tokens=40, prefill_chunk_tokens=40)
META = torch.device("meta")


class FirstTokens(NoKernels):
    """The sampler's kernel without Triton's interpreter, which allocates for itself: each row draws token 0."""

    def __getitem__(self, grid: object) -> Callable[..., None]:
        def draw(*arguments: object, **_options: object) -> None:
            tokens = arguments[-1]
            assert isinstance(tokens, torch.Tensor)
            tokens.zero_()

        return draw


def limited(path: Path, **settings: Any) -> EngineConfig:
    return config_of(path, scheduler=LIMITS.model_dump(), dtype="float32", **settings)


def batch_for(model: LoadedModel, limits: SchedulerConfig = LIMITS) -> StepBatch:
    return largest_batch(limits, model.model_info, block_size=16)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_weights_and_kv_of_a_configuration_are_those_of_the_loaded_model(
    tiny_model_path: Callable[[str], Path], architecture: str
) -> None:
    path = tiny_model_path(architecture)
    planned = planned_gpu_model(config_of(path, device="auto", backend="torch"), dtype=torch.float32)
    loaded = load(path, backend="torch")
    assert planned.layers == loaded.layers
    assert planned.states == loaded.states
    assert planned.model_info == loaded.model_info
    assert isinstance(loaded, TransformersModel)
    assert isinstance(planned, TransformersModel)
    real = sum(weight.nbytes for weight in loaded.module.parameters())  # each once, also if it is tied
    assert num_bytes_of(planned.module.parameters()) == real


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("quantization", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    ("architecture", "is_tied"), [("llama", True), ("qwen2", False), ("qwen3_moe", False), ("gemma4", True)]
)
def test_packed_weights_of_a_configuration_are_those_of_the_loaded_model(
    architecture: str, quantization: str, tmp_path: Path, *, is_tied: bool
) -> None:
    build_tiny_model(architecture, tie_word_embeddings=is_tied).save_pretrained(tmp_path)
    planned = planned_native_model(config_of(tmp_path, dtype="float32", quantization=quantization))
    loaded = load(tmp_path, quantization=quantization)
    assert isinstance(planned, NativeModel)
    assert isinstance(loaded, NativeModel)
    assert (planned.layers, planned.model_info) == (loaded.layers, loaded.model_info)
    assert [each.shape for each in planned.tensors()] == [each.shape for each in loaded.tensors()]
    assert num_bytes_of(planned.tensors()) == num_bytes_of(loaded.tensors())


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_the_largest_step_of_the_native_decoder_is_the_one_that_a_cpu_computes(tmp_path: Path) -> None:
    build_tiny_model("llama", vocab_size=20_000).save_pretrained(tmp_path)
    config = limited(tmp_path, cache={"num_blocks": 64})
    loaded = load_runner(config)
    assert isinstance(loaded.model, NativeModel)
    assert planned_cpu_memory(config).needs == loaded.model.needs(config, batch_for(loaded.model))
    batch = batch_for(loaded.model)
    in_cpp = buffer_bytes(loaded.model.weights, num_tokens=batch.num_scheduled_tokens, num_positions=256)
    loaded.runner.run(batch)  # what is kept is there
    of_torch = peak_of_cpu(lambda: loaded.runner.run(batch))
    assert loaded.model.needs(config, batch).step == pytest.approx(in_cpp + of_torch, rel=0.05)


@pytest.mark.parametrize(
    ("architecture", "backend"), [("llama", "torch"), ("gemma2", "torch"), ("gpt2", "torch"), ("llama", "auto")]
)
def test_the_largest_step_of_a_configuration_is_the_one_that_a_cpu_computes(
    architecture: str, backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda device: backend == "auto"))
    monkeypatch.setattr(CudaModel, "output", lambda model, source: model.reference.own)  # no number is looked at here
    build_tiny_model(architecture, vocab_size=5000).save_pretrained(tmp_path)
    planned = planned_gpu_model(config_of(tmp_path, dtype="float32", backend=backend), dtype=torch.float32)
    loaded = load(tmp_path, backend=backend)
    assert [isinstance(each, CudaModel) for each in (planned, loaded)] == [backend == "auto"] * 2
    for name, kernels in (("attention", NoKernels), ("decoder", NoKernels), ("sampler", FirstTokens)):
        monkeypatch.setattr(
            f"app.model.cuda.{name}.kernels_of", lambda *_, own=kernels: own()
        )  # the interpreter allocates for itself
    config = limited(tmp_path)
    on_meta, on_cpu = (each.needs(config, batch_for(each)) for each in (planned, loaded))
    assert on_meta.step == pytest.approx(on_cpu.step, rel=0.05)
    assert on_meta.weights == on_cpu.weights
    runner = with_one_block(config, loaded)
    runner.launch(batch_for(loaded))  # what is kept is there
    assert on_meta.step == pytest.approx(peak_of_cpu(lambda: runner.launch(batch_for(loaded))), rel=0.05)
    compare_captured(config, loaded, planned)


def compare_captured(config: EngineConfig, real: LoadedModel, planned: LoadedModel) -> int:
    """The memory of captured steps, which must be as planned. Returns that of the largest."""
    for size in (decode_size(6), *mixed_sizes(max_rows=6, max_tokens=40)):
        of_graph = peak_of_cpu(lambda size=size: with_one_block(config, real).compute_padding(size))
        with AllocatedBytes(META) as counted:
            with_one_block(config, planned).compute_padding(size)
        assert counted.peak == pytest.approx(of_graph, rel=0.05)
    return counted.peak


@pytest.mark.parametrize("architecture", ["mixtral", "qwen2_moe"])
def test_the_workspaces_of_experts_are_those_that_a_cpu_takes(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernels in ("attention", "decoder", "experts"):  # the interpreter allocates for itself
        monkeypatch.setattr(f"app.model.cuda.{kernels}.kernels_of", lambda *_: NoKernels())
    build_tiny_model(architecture).save_pretrained(tmp_path)
    planned = planned_gpu_model(config_of(tmp_path, dtype="float32"), dtype=torch.float32)
    loaded = load(tmp_path, backend="torch")
    assert isinstance(planned, CudaModel)
    assert isinstance(loaded, TransformersModel)
    settings = planned.weights.settings
    real = replace(planned, weights=fuse_weights(loaded.module, settings, num_positions=256), device=loaded.device)
    config = limited(tmp_path)
    assert num_bytes_of(planned.tensors()) == num_bytes_of(real.tensors())
    largest = compare_captured(config, real, planned)
    down = planned.weights.layers[0].down
    num_chosen = settings.experts.per_token + len(down) - settings.experts.num_experts
    assert largest > 40 * num_chosen * (down.shape[1] + down.shape[2]) * 4


def test_rows_with_penalties_take_a_copy_of_their_logits_in_float32() -> None:
    num_rows, vocab_size = 6, 50_000
    model_info = ModelInfo(max_model_len=4096, vocab_size=vocab_size, eos_token_ids=())
    items = largest_batch(LIMITS, model_info, block_size=16).sampled
    logits, peaks = torch.zeros(num_rows, vocab_size, dtype=torch.bfloat16, device=META), []
    for each in (items, [structs.replace(item, adjustments=None) for item in items]):
        with torch.inference_mode(), AllocatedBytes(META) as counted:
            TritonSampler(META).sample(logits, each)
        peaks.append(counted.peak)
    copied = num_rows * vocab_size * 4
    assert copied < peaks[0] - peaks[1] < 1.1 * copied


@pytest.mark.parametrize("num_rows", [8, 32])
def test_sampling_takes_on_a_cpu_what_is_counted_on_meta(num_rows: int) -> None:
    """By the allocator's own records; of a sort, without the memory that its implementation takes inside."""
    limits = SchedulerConfig(max_running=num_rows, max_step_tokens=num_rows)
    model_info = ModelInfo(max_model_len=4096, vocab_size=20_000, eos_token_ids=())
    items = largest_batch(limits, model_info, block_size=16).sampled
    with torch.inference_mode(), AllocatedBytes(META) as counted:
        Sampler().sample(torch.zeros(num_rows, model_info.vocab_size, device=META), items)
    logits = torch.randn(num_rows, model_info.vocab_size)
    with torch.inference_mode():
        Sampler().sample(logits, items)  # tables that are kept
        real = peak_of_cpu(lambda: Sampler().sample(logits, items))
    own_logits = logits.nbytes
    assert counted.peak - own_logits == pytest.approx(real, rel=0.05)


def test_a_sequence_keeps_few_blocks_of_layers_that_look_back_a_window(
    tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    limits = {"max_running": 4, "max_step_tokens": 64, "prefill_chunk_tokens": 16}
    config = config_of(tiny_model_path("gemma2"), cache={"block_size": 4}, scheduler=limits, dtype="float32")
    planned = planned_memory(config)
    # 64 blocks for 256 tokens; of the window of 9 tokens a tile of 64 before it, two chunks and two blocks more.
    assert planned.sequence_blocks == 64 + 26 + 2
    assert (
        planned.block_bytes * 2
        == planned_memory(config.with_setting("cache.tiers", [{"path": str(tmp_path)}])).block_bytes
    )


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
@pytest.mark.parametrize("architecture", ["gemma4", "gemma4_large"])
def test_a_block_of_layers_of_unequal_shapes_takes_what_is_planned_for_a_cpu(
    architecture: str, kv_dtype: str, tiny_model_path: Callable[[str], Path]
) -> None:
    config = limited(tiny_model_path(architecture), cache={"num_blocks": 64, "dtype": kv_dtype})
    planned, loaded = planned_cpu_memory(config), load_runner(config)
    assert loaded.model.model_info.num_window_groups > 0
    assert sum(each.nbytes for each in loaded.runner.forward.kv_tensors) == 64 * planned.block_bytes


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_replicas_that_fetch_from_one_another_are_planned_with_what_lies_behind_windows(
    tiny_model_path: Callable[[str], Path],
) -> None:
    config = limited(tiny_model_path("gemma4"), cache={"num_blocks": 64})
    planned, loaded = planned_cpu_memory(config, has_peers=True), load_runner(config, keeps_all=True)
    assert planned.block_bytes > planned_cpu_memory(config).block_bytes, "a block has all layers"
    assert sum(each.nbytes for each in loaded.runner.forward.kv_tensors) == 64 * planned.block_bytes
    sleeping = [memory_to_sleep(config, has_peers=has_peers).needed_bytes for has_peers in (False, True)]
    assert sleeping[1] - sleeping[0] == 64 * (planned.block_bytes - planned_cpu_memory(config).block_bytes)
