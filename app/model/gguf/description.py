"""What a GGUF file says of its model, in transformers' words: its config.json, its weights' names.

One table of architectures; whatever is not in it is refused by name, since a tensor or a setting that is passed over
would make another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from app.errors import UnsupportedModel
from app.model.gguf.reader import READ_INSTEAD, GgufFile, GgufTensor

# transformers' type of a model and its class.
_ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
_EXPERT = "{expert}"  # in the name of a weight: each expert has its own, while a file has one tensor for all
# By transformers' type: the part of a layer that has them, names of their weights, of their number in config.json.
_EXPERTS = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj"), "num_experts"),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2"), "num_local_experts"),
}
_BIASED = {"qwen2": ("attn_q", "attn_k", "attn_v")}
_FACTORS = "rope_freqs.weight"
# Of `rope_type: llama3`; all models of the families 3.1 to 3.3 have these, with a factor of 8 or 32.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_KNOWN = frozenset(
    (
        "block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size",
        "attention.head_count", "attention.head_count_kv", "attention.key_length", "attention.value_length",
        "attention.layer_norm_rms_epsilon", "rope.dimension_count", "rope.freq_base", "rope.scaling.type",
        "rope.scaling.factor", "rope.scaling.finetuned", "rope.scaling.original_context_length",
        "expert_count", "expert_used_count", "expert_feed_forward_length",
    )
)  # fmt: skip
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


@dataclass(frozen=True, slots=True)
class Description:
    """A model as transformers describes it."""

    config: dict[str, Any]  # config.json
    eos_token_ids: list[int]
    tensors: dict[str, GgufTensor]  # by transformers' name of the weight
    interleaved_heads: dict[str, int]  # of weights of queries and keys in llama.cpp's order of rows: number of heads


def describe(file: GgufFile) -> Description:
    """Raises UnsupportedModel, by name, for an architecture, a setting or a tensor that cannot be read."""
    architecture = str(file.metadata.get("general.architecture"))
    if architecture not in _ARCHITECTURES:
        raise UnsupportedModel(
            f"{file.path} is of architecture {architecture[:60]!r}; GGUF files of {', '.join(_ARCHITECTURES)} can be "
            f"read: {READ_INSTEAD}"
        )
    if (parts := file.metadata.get("split.count", 1)) not in (0, 1):
        raise UnsupportedModel(f"{file.path} is one of {parts!r} parts; join them with `llama-gguf-split --merge`")
    config = _config(file, _Settings(file, architecture))
    names = _names(config, has_head="output.weight" in file.tensors)
    _check_tensors(file, names)
    tensors: dict[str, GgufTensor] = {}
    for source, (name, _) in names.items():
        tensor = file.tensors[source]
        parts = enumerate(tensor.parts()) if _EXPERT in name else [(0, tensor)]
        tensors |= {name.replace(_EXPERT, str(expert)): part for expert, part in parts}
    heads = {"q_proj.weight": config["num_attention_heads"], "k_proj.weight": config["num_key_value_heads"]}
    interleaved = {
        name: heads[end] for name in tensors for end in heads if architecture == "llama" and name.endswith(f".{end}")
    }
    return Description(config, _eos_token_ids(file.metadata), tensors, interleaved)


def _eos_token_ids(metadata: Mapping[str, Any]) -> list[int]:
    found = (metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return list(dict.fromkeys(token for token in found if token is not None))


class _Settings:
    """The settings of one architecture in a file's metadata."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self._file = file
        self.architecture = architecture
        prefix = f"{architecture}."
        self._found = {
            key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)
        }
        for key, value in self._found.items():
            if key not in _KNOWN and value:
                raise self.refusal(key, value)

    def count(self, key: str, default: int | None = None) -> int:
        """Raises UnsupportedModel when it is no positive integer, or there is none and no default."""
        value = self._found.get(key, default)
        if type(value) is not int or value < 1:
            raise self.refusal(key, value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Raises UnsupportedModel when it is no positive number, or there is none and no default."""
        value = self._found.get(key, default)
        if not isinstance(value, float) or not 0 < value < float("inf"):
            raise self.refusal(key, value)
        return value

    @property
    def has_experts(self) -> bool:
        return bool(self._found.get("expert_count"))

    def text(self, key: str, default: str) -> str:
        return str(self._found.get(key, default))

    def refusal(self, key: str, value: object) -> UnsupportedModel:
        shown = f"{self.architecture}.{key} is {repr(value)[:60]}"
        return UnsupportedModel(f"{self._file.path}: {shown}, which cannot be read; {READ_INSTEAD}")


def _config(file: GgufFile, settings: _Settings) -> dict[str, Any]:
    """The content of config.json."""
    hidden_size, num_heads = settings.count("embedding_length"), settings.count("attention.head_count")
    head_dim = settings.count("attention.key_length", hidden_size // num_heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if settings.count(key, head_dim) != head_dim:
            raise settings.refusal(key, settings.count(key))
    if head_dim % 2:
        raise settings.refusal("attention.key_length", head_dim)
    num_layers = settings.count("block_count")
    if num_layers > len(file.tensors):  # before their names are made: a damaged number may be larger than any memory
        raise settings.refusal("block_count", num_layers)
    embedding = file.tensors.get("token_embd.weight")
    kind, class_name = _ARCHITECTURES[settings.architecture]
    if kind == "llama" and settings.has_experts:
        kind, class_name = "mixtral", "MixtralForCausalLM"
    tokenizer = {name: file.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding")}
    return {
        "architectures": [class_name],
        "model_type": kind,
        "dtype": "float32" if embedding is None else embedding.value_type.torch,
        "vocab_size": settings.count("vocab_size", 1) if embedding is None else embedding.shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": settings.count("feed_forward_length"),
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": settings.count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": settings.number("attention.layer_norm_rms_epsilon"),
        "max_position_embeddings": settings.count("context_length"),
        "rope_parameters": _rope(file, settings, head_dim),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": tokenizer["bos"],
        "eos_token_id": file.metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": tokenizer["padding"],
        **_experts(settings, kind),
    }


def _experts(settings: _Settings, kind: str) -> dict[str, Any]:
    """What config.json says of a mixture of experts. llama.cpp has the weights of a token's experts sum up to one."""
    if kind not in _EXPERTS:
        if settings.has_experts:
            raise settings.refusal("expert_count", settings.count("expert_count"))
        return {}
    num_experts, per_token = settings.count("expert_count"), settings.count("expert_used_count")
    if per_token > num_experts:
        raise settings.refusal("expert_used_count", per_token)
    counts: dict[str, Any] = {_EXPERTS[kind][2]: num_experts, "num_experts_per_tok": per_token}
    if kind == "mixtral":
        return counts
    return counts | {
        "moe_intermediate_size": settings.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _rope(file: GgufFile, settings: _Settings, head_dim: int) -> dict[str, Any]:
    theta = settings.number("rope.freq_base", 10_000.0)
    kind = settings.text("rope.scaling.type", "none")
    factors = file.tensors.get(_FACTORS)
    if factors is not None:
        found = file.values(factors).astype(np.float32)
        factor = float(found.max(initial=1.0))
        is_known = found.shape == (head_dim // 2,)
        if not is_known or not np.allclose(found, _llama3_factors(theta, head_dim, factor), rtol=1e-3):
            raise UnsupportedModel(f"{file.path}: tensor {_FACTORS} scales positions in an unknown way; {READ_INSTEAD}")
        return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **_LLAMA3}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": settings.number("rope.scaling.factor")}
    if kind != "none":
        raise settings.refusal("rope.scaling.type", kind)
    return {"rope_type": "default", "rope_theta": theta}


def _llama3_factors(theta: float, head_dim: int, factor: float) -> np.ndarray[Any, Any]:
    """By how much llama.cpp divides each frequency for `rope_type: llama3`."""
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    low, high, length = _LLAMA3.values()
    smooth = (length / wavelengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(wavelengths < length / high, 1.0, np.where(wavelengths > length / low, factor, between))


def _names(config: dict[str, Any], *, has_head: bool) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Each tensor of such a file: transformers' name of it and its shape."""
    kind, hidden = config["model_type"], config["hidden_size"]
    head_dim, vocab_size = config["head_dim"], config["vocab_size"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    layer: dict[str, tuple[str, tuple[int, ...]]] = {
        "attn_norm": ("input_layernorm", (hidden,)),
        "attn_q": ("self_attn.q_proj", (queries, hidden)),
        "attn_k": ("self_attn.k_proj", (keys, hidden)),
        "attn_v": ("self_attn.v_proj", (keys, hidden)),
        "attn_output": ("self_attn.o_proj", (hidden, queries)),
        "ffn_norm": ("post_attention_layernorm", (hidden,)),
        **_mlp_names(config),
    }
    if kind in ("qwen3", "qwen3_moe"):
        layer |= {"attn_q_norm": ("self_attn.q_norm", (head_dim,)), "attn_k_norm": ("self_attn.k_norm", (head_dim,))}
    names: dict[str, tuple[str, tuple[int, ...]]] = {
        "token_embd.weight": ("model.embed_tokens.weight", (vocab_size, hidden)),
        "output_norm.weight": ("model.norm.weight", (hidden,)),
    }
    if has_head:
        names["output.weight"] = ("lm_head.weight", (vocab_size, hidden))
    for index in range(config["num_hidden_layers"]):
        for source, (name, shape) in layer.items():
            names[f"blk.{index}.{source}.weight"] = (f"model.layers.{index}.{name}.weight", shape)
        for source in _BIASED.get(kind, ()):
            name, shape = layer[source]
            names[f"blk.{index}.{source}.bias"] = (f"model.layers.{index}.{name}.bias", shape[:1])
    return names


def _mlp_names(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The part of a layer's `_names` that an MLP or a mixture of experts has."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] not in _EXPERTS:
        return {
            "ffn_gate": ("mlp.gate_proj", (inner, hidden)),
            "ffn_up": ("mlp.up_proj", (inner, hidden)),
            "ffn_down": ("mlp.down_proj", (hidden, inner)),
        }
    part, (gate, up, down), count = _EXPERTS[config["model_type"]]
    experts, num_experts = f"{part}.experts.{_EXPERT}", config[count]
    inner = config.get("moe_intermediate_size", inner)
    return {
        "ffn_gate_inp": (f"{part}.gate", (num_experts, hidden)),
        "ffn_gate_exps": (f"{experts}.{gate}", (num_experts, inner, hidden)),
        "ffn_up_exps": (f"{experts}.{up}", (num_experts, inner, hidden)),
        "ffn_down_exps": (f"{experts}.{down}", (num_experts, hidden, inner)),
    }


def _check_tensors(file: GgufFile, names: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
    missing = [name for name in names if name not in file.tensors]
    if missing:
        raise UnsupportedModel(f"{file.path} has no tensor {missing[0]}, and {len(missing) - 1:,} more are missing")
    unknown = [name for name in file.tensors if name not in names and name != _FACTORS]
    if unknown:
        raise UnsupportedModel(
            f"{file.path}: tensor {unknown[0]} is not part of a {file.metadata['general.architecture']} model that can "
            f"be read; {READ_INSTEAD}"
        )
    for name, (_, shape) in names.items():
        found = file.tensors[name].shape
        if found != shape:
            raise UnsupportedModel(f"{file.path}: tensor {name} has the shape {list(found)}; expected {list(shape)}")
