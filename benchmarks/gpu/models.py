"""Models of known shapes with random weights that are made on the device: no file has to be read or copied."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM

from app.build import assemble
from app.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from app.engine.batch import StepBatch, StepResult
from app.engine.block_store import BlockStore
from app.engine.engine import Engine
from app.engine.model_runner import ModelRunner
from app.model.attention import ATTENTION_NAME
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.implementations.loaded_model import LoadedModel
from app.model.loader import load_model
from app.model.source import ModelSource, adapt
from benchmarks.gpu.bench import BLOCK_SIZE, Bench
from benchmarks.gpu.graphs import Replays

# Qwen3-8B
_8B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000},
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "dtype": "bfloat16",
}
_TINY = _8B | {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 320, "max_position_embeddings": 256,
}  # fmt: skip
_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "rope_theta": 500_000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000},
    "rms_norm_eps": 1e-5,
}
_GEMMA: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "vocab_size": 256000,
    "sliding_window": 4096,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "hidden_activation": "gelu_pytorch_tanh",
    "layer_types": ["sliding_attention"],
    "tie_word_embeddings": True,
}
_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "layer_types": ["sliding_attention"],
    "rope_theta": 150_000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150_000},
}
_ONE_LAYER = {"num_hidden_layers": 1}
_NARROW = {name: _TINY[name] for name in _TINY if name.endswith(("_size", "_heads", "head_dim"))} | _ONE_LAYER
# Models of one layer at its real width. The shape "sampling" has one thin layer, so its steps are mostly sampling.
LAYERS = ("Llama-3-8B", "Qwen3-8B", "Gemma-2-9B", "gpt-oss-20B")
_SMALL = _TINY | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
_QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
_GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "query_pre_attn_scalar": 16,
    "sliding_window": 16,
    "layer_types": ["sliding_attention", "full_attention"],
    "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10_000}
                        for kind in ("sliding_attention", "full_attention")},
}  # fmt: skip
_QWEN3_5: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
# Llama-3.2-1B
_1B = _8B | _LLAMA | {
    "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "head_dim": 64,
    "tie_word_embeddings": True,
}  # fmt: skip
_SHAPES = {
    "tiny Llama": (_SMALL | _LLAMA | _NARROW | {"num_hidden_layers": 2},) * 2,
    "tiny Qwen3-MoE": (_SMALL | _QWEN3_MOE,) * 2,
    "tiny Gemma 3": (_SMALL | _GEMMA3,) * 2,
    "tiny Qwen3.5": (_SMALL | _QWEN3_5,) * 2,
    "1B": (_1B, _TINY),
    "8b": (_8B, _TINY),
    "sampling": (
        _8B | {"num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 256, "num_attention_heads": 2,
               "num_key_value_heads": 2},
        _TINY,
    ),
    "ranks": (_8B | {"num_hidden_layers": 4}, _TINY | {"num_key_value_heads": 2}),
    "Llama-3-8B": (_8B | _LLAMA | _ONE_LAYER, _8B | _LLAMA | _NARROW),
    "Qwen3-8B": (_8B | _ONE_LAYER, _8B | _NARROW),
    "Gemma-2-9B": (_8B | _GEMMA | _ONE_LAYER, _8B | _GEMMA | _NARROW),
    "gpt-oss-20B": (_8B | _GPT_OSS | _ONE_LAYER, _8B | _GPT_OSS | _NARROW | {"num_local_experts": 4}),
}  # fmt: skip


def engine_config(
    bench: Bench,
    shape: str = "8b",
    *,
    max_running: int | None = None,
    max_step_tokens: int | None = None,
    max_model_len: int | None = None,
    num_blocks: int | None = None,
    **model: Any,
) -> EngineConfig:
    """Return the engine's settings for a model of this shape. Only the config.json of the model is written.

    num_blocks: of KV memory; None: the rest of the GPU's memory. model: more settings of the model. The limits of a
    step are the limits in deployments/serve_gpu.yaml.
    """
    folder = bench.out / "models" / shape
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(bench.sized(*_SHAPES[shape])), encoding="utf-8")
    return EngineConfig(
        model=ModelConfig.model_validate(
            {"path": str(folder), "dtype": "bfloat16", "device": bench.device.type, "max_model_len": max_model_len}
            | model
        ),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_blocks, memory_gib=0.01),
        scheduler=SchedulerConfig(
            max_running=max_running or bench.sized(256, 2),
            max_step_tokens=max_step_tokens or bench.sized(8192, 8),
            prefill_chunk_tokens=bench.sized(2048, 8),
            max_waiting=10_000,
        ),
    )


@contextmanager
def made_weights() -> Iterator[None]:
    """Give random weights, made on the device, to models loaded in this context. The loader does all further work."""

    def made(source: ModelSource) -> Any:
        module = random_module(source.found, source.dtype, source.device)
        adapt(source, module)
        return module

    with patch("app.model.implementations.transformers_code.read_module", made):
        yield


def made_model(config: EngineConfig) -> LoadedModel:
    """Return a loaded model with random weights, checked like any other model."""
    with made_weights():
        return load_model(config.model, config.model.path, block_size=config.cache.block_size)


def engine_of(
    config: EngineConfig,
    model: LoadedModel,
    *,
    overlaps: bool = True,
    runner: ModelRunner | None = None,
    store: BlockStore | None = None,
) -> Engine:
    """Return an engine around a loaded model. overlaps: it launches a step while the previous step is computed.

    runner: of the model; default: a new runner.
    """
    num_blocks = config.cache.num_blocks
    assert num_blocks is not None, "an engine that shares a model needs cache.num_blocks"
    runner = runner or model.runner(config, num_blocks=num_blocks, num_threads=1)
    return assemble(
        config.scheduler,
        config.cache,
        num_blocks=num_blocks,
        runner=runner if overlaps or not isinstance(runner, GraphModelRunner) else _WithoutLaunches(runner),
        model_info=model.model_info,
        store=store,
    )


def prepared_runner(config: EngineConfig, model: LoadedModel) -> tuple[ModelRunner, Replays]:
    """Return a runner that is ready to launch steps, and its graphs. Raises BenchmarkError if graphs are missing."""
    with Replays().watched() as replays:
        runner = engine_of(config, model).runner
    assert runner.launches, "on a GPU steps are launched"
    runner.prepare()
    replays.check(config, runner)
    return runner, replays


def prompt_operations(bench: Bench, length: int) -> int:
    """Return the operations of the 8B shape for a prompt: matrices, causal attention, one row of logits."""
    shape = bench.sized(*_SHAPES["8b"])
    hidden, head_dim, heads = shape["hidden_size"], shape["head_dim"], shape["num_attention_heads"]
    attention = hidden * head_dim * 2 * (heads + shape["num_key_value_heads"])
    matrices = attention + 3 * hidden * shape["intermediate_size"]
    of_pairs = 2 * heads * head_dim * length * (length + 1)
    of_layers = shape["num_hidden_layers"] * (2 * matrices * length + of_pairs)
    return int(of_layers + 2 * hidden * shape["vocab_size"])


class _WithoutLaunches(ModelRunner):
    """A model runner that waits for each step."""

    def __init__(self, runner: GraphModelRunner) -> None:
        self._runner = runner

    def run(self, batch: StepBatch) -> StepResult:
        return self._runner.run(batch)


def random_module(found: Any, dtype: torch.dtype, device: torch.device, *, attention: str = ATTENTION_NAME) -> Any:
    """Return transformers' model of a configuration, with weights drawn on the device by its code from one seed."""
    torch.manual_seed(0)
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(found, dtype=dtype, attn_implementation=attention)
    return module.eval()
