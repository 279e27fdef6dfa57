"""A transformers model from a folder or hub id, checked to be one that can be served."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from app.config import ModelConfig
from app.engine.facts import ModelFacts
from app.errors import InvalidSetup, UnsupportedModel
from app.model.attention import ATTENTION_NAME, ProbeStep, UnknownAttention
from app.model.kv_cache import LayerShape
from app.model.packed_linear import pack_linear_layers

_SERVABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_PROBE_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that can be served, and what was found out about it."""

    module: PreTrainedModel
    facts: ModelFacts
    layers: dict[int, LayerShape]  # by layer index
    dtype: torch.dtype
    device: torch.device


@torch.inference_mode()
def load_model(config: ModelConfig, location: str) -> LoadedModel:
    """Load weights from safetensors and try one short forward pass. Code from a model repository never runs.

    Raises:
        InvalidSetup: there is no such model, or no such device.
        UnsupportedModel: it is not a decoder-only model whose attention can be paged; the message says why.
    """
    device = _device(config)
    dtype = _dtype(config, device)
    _check_architecture(config, location)
    module = _from_pretrained(config, location, dtype).eval().to(device)
    if device.type == "cpu" and config.packed_weights:
        pack_linear_layers(module)
    probe = _probe(config, module)
    return LoadedModel(
        module=module,
        facts=ModelFacts(
            max_model_len=_max_model_len(config, module.config.get_text_config()),
            vocab_size=min(probe.vocab_size, module.get_input_embeddings().weight.shape[0]),
            eos_token_ids=eos_token_ids(module),
        ),
        layers=probe.layers,
        dtype=dtype,
        device=device,
    )


@torch.inference_mode()
def run_full_step(model: LoadedModel, *, num_tokens: int, num_sampled: int) -> None:
    """Compute as much as a step ever may, so that the allocator's peak is known before KV memory is sized."""
    num_tokens = min(num_tokens, model.facts.max_model_len)
    token_ids = torch.zeros(1, num_tokens, dtype=torch.long, device=model.device)
    model.module(
        input_ids=token_ids,
        position_ids=torch.arange(num_tokens, device=model.device)[None],
        use_cache=False,
        logits_to_keep=min(num_sampled, num_tokens),
        paged=ProbeStep(),
    )


def _device(config: ModelConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise InvalidSetup("model.device is cuda, but torch sees no CUDA device; use cpu, or install a CUDA torch")
    return torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")


def _dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    if config.dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return torch.float32 if config.dtype == "float32" else torch.bfloat16


def _check_architecture(config: ModelConfig, location: str) -> None:
    """Refuse by its configuration, before any weight is read."""
    try:
        found = AutoConfig.from_pretrained(location, revision=config.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InvalidSetup(
            f"model.path {config.path!r} is neither a folder with a model nor a model that can be loaded "
            f"(looked at {location!r}): {_first_line(error)}"
        ) from error
    name = found.model_type
    if getattr(found, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{config.path} is an encoder-decoder model ({name}); only decoder-only models are served"
        )
    if type(found) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(f"{config.path} ({name}) is no model that generates text by itself")
    kinds = set(getattr(found.get_text_config(), "layer_types", None) or ()) - _SERVABLE_LAYERS
    if kinds:
        raise UnsupportedModel(f"{config.path} ({name}) has layers without paged attention: {', '.join(sorted(kinds))}")


def _from_pretrained(config: ModelConfig, location: str, dtype: torch.dtype) -> PreTrainedModel:
    try:
        module: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            location,
            revision=config.revision,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
        )
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"{config.path} cannot be loaded: {_first_line(error)}") from error
    return module


@dataclass(frozen=True, slots=True)
class _Probe:
    layers: dict[int, LayerShape]
    vocab_size: int


def _probe(config: ModelConfig, module: PreTrainedModel) -> _Probe:
    """Run our attention and the model's own on the same few tokens: refuse a model on which they differ."""
    name = module.config.model_type
    step = ProbeStep()
    count = torch.arange(_PROBE_TOKENS, device=module.device)[None]
    arguments = {
        "input_ids": count % module.get_input_embeddings().weight.shape[0],
        "position_ids": count,
        "use_cache": False,
        "output_hidden_states": True,
    }
    try:
        ours = module(**arguments, paged=step)
    except (UnknownAttention, TypeError) as error:
        raise UnsupportedModel(f"{config.path} ({name}) cannot run on paged attention: {_first_line(error)}") from error
    if not step.layers:
        raise UnsupportedModel(f"{config.path} ({name}) ignores the attention it is given, so its KV cannot be paged")
    module.set_attn_implementation("eager")
    own = module(**arguments)
    module.set_attn_implementation(ATTENTION_NAME)
    # Rounding grows from layer to layer, a wrong attention is wrong at once: hence a tight and a wide limit.
    is_exact = module.dtype == torch.float32
    for what, mine, theirs, limit in (
        ("the first layer's output", ours.hidden_states[1], own.hidden_states[1], 1e-4 if is_exact else 0.03),
        ("the output", ours.logits, own.logits, 1e-3 if is_exact else 0.5),
    ):
        difference = _relative_difference(mine, theirs)
        if not difference <= limit:
            raise UnsupportedModel(
                f"{config.path} ({name}) computes something else with paged attention than with its own: "
                f"{what} differs by {difference:.2%}, {limit:.2%} is allowed"
            )
    return _Probe(layers=step.layers, vocab_size=ours.logits.shape[-1])


def _relative_difference(mine: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((mine.float() - theirs.float()).norm() / theirs.float().norm().clamp_min(1e-9))


def _max_model_len(config: ModelConfig, found: Any) -> int:
    limit: int | None = getattr(found, "max_position_embeddings", None)
    asked = config.max_model_len
    longest = asked if asked is not None else limit
    if longest is None:
        raise InvalidSetup(f"{config.path} does not say how long its context is; set model.max_model_len")
    if limit is not None and asked is not None and asked > limit:
        raise InvalidSetup(f"model.max_model_len is {asked:,}; {config.path} accepts at most {limit:,} tokens")
    return longest


def eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end generation: the generation config's, else the model config's."""
    generation = getattr(module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = module.config.get_text_config().eos_token_id
    if found is None:
        return ()
    return tuple(found) if isinstance(found, Iterable) else (int(found),)


def _first_line(error: BaseException) -> str:
    return str(error).strip().split("\n", 1)[0]
