"""Small GGUF files, written with llama.cpp's own package as its converter writes them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tokenizers import pre_tokenizers
from transformers import PreTrainedConfig, PreTrainedModel

from tests.tiny_models import build_tiny_model

TEMPLATE = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
TOKENS = [*BYTES, "he", "Ġt", "<|start|>", "<|end|>"]
_NORMAL, _CONTROL = 1, 3
START, END = TOKENS.index("<|start|>"), TOKENS.index("<|end|>")
_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps",
    "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps",
}
_SHAPE = {
    "vocab_size": len(TOKENS), "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64,
    "initializer_range": 0.1, "eos_token_id": END, "bos_token_id": START, "pad_token_id": None, "sliding_window": None,
}  # fmt: skip
_OF_EXPERTS = {
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 256, "num_experts_per_tok": 3, "mlp_only_layers": []},
    "mixtral": {"num_local_experts": 6, "num_experts_per_tok": 3},
}
_ARCHITECTURES = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}  # others have their own name
F32 = GGMLQuantizationType.F32


def tiny_model(architecture: str = "llama", **changes: Any) -> PreTrainedModel:
    """Wide enough for every type's blocks."""
    model = build_tiny_model(architecture, **_SHAPE | _OF_EXPERTS.get(architecture, {}) | changes)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                parameter.normal_(std=0.1)
    return model


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    kind: GGMLQuantizationType = F32,
    *,
    settings: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray[Any, Any]] | None = None,
    without: str | None = None,
) -> Path:
    """Write a model; afterwards its weights are what the file's blocks stand for.

    settings: of the metadata, in addition or instead; tensors: in addition, without: a tensor that is left out.
    """
    config = model.config
    name = _ARCHITECTURES.get(config.model_type, str(config.model_type))
    writer = GGUFWriter(path, name)
    for key, value in (_settings(config) | dict(settings or {})).items():
        _add(writer, key, value)
    for source, weight in _weights(model):
        if source == "lm_head.weight" and config.tie_word_embeddings:
            continue
        target = _target(source)
        blocks, values = _blocks(weight, F32 if weight.dim() == 1 else kind)
        weight.copy_(values)
        heads = {"attn_q.weight": config.num_attention_heads, "attn_k.weight": config.num_key_value_heads}
        for end, num_heads in heads.items():
            if name == "llama" and target.endswith(end):
                blocks = blocks.reshape(num_heads, 2, -1, blocks.shape[-1]).swapaxes(1, 2).reshape(blocks.shape)
        if target != without:
            writer.add_tensor(
                target, np.ascontiguousarray(blocks), raw_dtype=None if blocks.dtype == np.float32 else kind
            )
    for target, values in (tensors or {}).items():
        writer.add_tensor(target, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    kind = _ARCHITECTURES.get(config.model_type, config.model_type)
    types = [_CONTROL if token.startswith("<|") else _NORMAL for token in TOKENS]
    return {
        f"{kind}.block_count": config.num_hidden_layers,
        f"{kind}.context_length": config.max_position_embeddings,
        f"{kind}.embedding_length": config.hidden_size,
        f"{kind}.feed_forward_length": config.intermediate_size,
        f"{kind}.attention.head_count": config.num_attention_heads,
        f"{kind}.attention.head_count_kv": config.num_key_value_heads,
        f"{kind}.attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        f"{kind}.rope.freq_base": float(config.rope_parameters["rope_theta"]),
        f"{kind}.vocab_size": config.vocab_size,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": TOKENS,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": ["h e", "Ġ t"],
        "tokenizer.ggml.bos_token_id": START,
        "tokenizer.ggml.eos_token_id": END,
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    } | _expert_settings(config, kind)


def _expert_settings(config: PreTrainedConfig, kind: str) -> dict[str, Any]:
    if not hasattr(config, "num_experts"):
        return {}
    settings = {f"{kind}.expert_count": config.num_experts, f"{kind}.expert_used_count": config.num_experts_per_tok}
    if kind == "qwen3moe":
        settings[f"{kind}.expert_feed_forward_length"] = config.moe_intermediate_size
    return settings


def _weights(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The model's own weights; those that transformers joins for all experts are apart here."""
    for name, weight in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            for part, own in zip(("gate", "up"), weight.chunk(2, dim=1), strict=True):
                yield name.replace("gate_up_proj", f"{part}_proj.weight"), own
        elif name.endswith("experts.down_proj"):
            yield f"{name}.weight", weight
        else:
            yield name, weight


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value is not None:
        writer.add_array(key, value)


def _target(source: str) -> str:
    stem, _, end = source.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, index, inner = stem.split(".", 3)
        return f"blk.{index}.{_NAMES[inner]}.{end}"
    return f"{_NAMES[stem]}.{end}"


def _blocks(weight: torch.Tensor, kind: GGMLQuantizationType) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """A weight's blocks, and what they stand for. Blocks of k-quants are random: the package cannot make them."""
    values = weight.numpy().astype(np.float32)
    try:
        blocks = quantize(values, kind)
    except NotImplementedError:
        blocks = _random_blocks(values.shape, kind)
    return blocks, torch.from_numpy(np.array(dequantize(blocks, kind), np.float32))


def _random_blocks(shape: tuple[int, ...], kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    block, block_bytes = GGML_QUANT_SIZES[kind]
    random = np.random.default_rng(0)
    blocks = random.integers(0, 256, (*shape[:-1], shape[-1] // block, block_bytes), np.uint8)
    small = np.frombuffer(np.float16(0.0003).tobytes(), np.uint8)
    if kind == GGMLQuantizationType.Q6_K:
        blocks[..., -2:] = small  # d
    else:
        assert kind == GGMLQuantizationType.Q4_K, kind
        blocks[..., :4] = np.tile(small, 2)  # d and dmin
    return blocks.reshape(*shape[:-1], -1)
