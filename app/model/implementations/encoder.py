"""Loads encoders and cross-encoders from a folder or hub id, and verifies them against transformers' code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from app.config import ModelConfig
from app.engine.batch import ScheduledSequence
from app.engine.request import ModelInfo, Pooling, SamplingParams
from app.errors import InvalidSetup, UnsupportedModel, first_line
from app.model.attention import UnknownAttention
from app.model.description import CLASSIFIER, max_model_len, sentence_settings
from app.model.device import device_of, dtype_of
from app.model.encoder import (
    PACKED_ATTENTION_NAME,
    Activation,
    Encoder,
    EncoderRunner,
    ScoreHead,
    has_token_types,
    packed_attention,
    scores_of,
    token_types,
)
from app.model.positions import fix_positions
from app.model.source import config_of_transformers, pretrained, unsupported_if_fails
from app.model.verification import difference_above

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def _unchanged(logits: torch.Tensor) -> torch.Tensor:
    return logits


_SIGMOID = "torch.nn.modules.activation.Sigmoid"
_ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {_SIGMOID: torch.sigmoid, "torch.nn.modules.linear.Identity": _unchanged}
)
_MAX_DIFFERENCES = {torch.float32: 1e-4, torch.bfloat16: 0.05}  # relative to the size of the expected states


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedEncoder:
    """An encoder that is ready to serve, with the type and the device of its weights."""

    runner: EncoderRunner
    model_info: ModelInfo
    dtype: torch.dtype
    device: torch.device


@torch.inference_mode()
def load_encoder(config: ModelConfig, location: str) -> LoadedEncoder:
    """Load weights from safetensors, and compare a few packed sequences with the results of transformers' code.

    Raises:
        InvalidSetup: the model or the device does not exist, or a setting applies only to models that generate.
        UnsupportedModel: the model cannot run without padding, or computes different results; the message says why.
    """
    for name, given, usual in (
        ("quantization", config.quantization, "none"),
        ("batch_invariant", config.batch_invariant, False),
    ):
        if given != usual:
            raise InvalidSetup(
                f"model.{name} is {given}, which encoders such as {config.path} do not support; remove the setting"
            )
    device, chosen = device_of(config), dtype_of(config, location)
    with unsupported_if_fails(config.path):
        return _verified(config, location, device, chosen.dtype)


def _verified(config: ModelConfig, location: str, device: torch.device, dtype: torch.dtype) -> LoadedEncoder:
    module = _loaded(config, location, dtype, device)
    base, own = module.base_model, _own_outputs(module)
    encoder, score = Encoder(base, device), _score_head(config, module)
    labels = () if score is None else _labels_of(module.config)
    _compare(config, encoder, score, own)
    sentences = sentence_settings(config, location)
    if sentences.why_not is not None:
        raise UnsupportedModel(f"{config.path} cannot be served: {sentences.why_not}")
    limit = getattr(module.config, "max_position_embeddings", None)
    longest = max_model_len(config, None if limit is None else limit - encoder.num_unused_positions)
    if config.max_model_len is None and sentences.max_length is not None:
        longest = min(longest, sentences.max_length)
    fix_positions(base, longest)
    model_info = ModelInfo(
        max_model_len=longest,
        vocab_size=base.get_input_embeddings().weight.shape[0],
        eos_token_ids=(),
        embedding_size=own[0].shape[-1] if score is None else None,
        generates=False,
        scores_pairs=score is not None and not labels,
        labels=labels,
        pooling=sentences.pooling or Pooling.MEAN,
    )
    return LoadedEncoder(
        runner=EncoderRunner(encoder, device, score), model_info=model_info, dtype=dtype, device=device
    )


def _loaded(config: ModelConfig, location: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    from transformers import AttentionInterface, AutoModel, AutoModelForSequenceClassification

    AttentionInterface.register(PACKED_ATTENTION_NAME, packed_attention)
    found = config_of_transformers(config, location)
    is_classifier = str((found.architectures or [""])[0]).endswith(CLASSIFIER)
    kind = AutoModelForSequenceClassification if is_classifier else AutoModel
    try:
        return pretrained(
            kind, config, location, dtype=dtype, attention=PACKED_ATTENTION_NAME,
            unused=() if is_classifier else ("pooler.",),
        ).to(device)  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModel(f"{config.path} cannot be loaded: {first_line(error)}") from error


class _InPlaceOfEncoder(nn.Module):
    """Replaces the encoder and returns states that are already computed, so that only the classifier's head runs."""

    def __init__(self, pooler: nn.Module | None) -> None:
        super().__init__()
        self._pooler = pooler

    def forward(self, *_: Any, inputs_embeds: torch.Tensor, **others: Any) -> Any:
        from transformers.modeling_outputs import BaseModelOutputWithPooling

        pooled = None if self._pooler is None else self._pooler(inputs_embeds)
        return BaseModelOutputWithPooling(last_hidden_state=inputs_embeds, pooler_output=pooled)


class _FirstTokenHead(nn.Module):
    """The head of a classifier that reads the first token. Replaces the encoder inside the given module."""

    def __init__(self, module: PreTrainedModel) -> None:
        super().__init__()
        base = module.base_model
        setattr(module, module.base_model_prefix, _InPlaceOfEncoder(getattr(base, "pooler", None)))
        self._module = module

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """states: [num_sequences, hidden_size]"""
        logits: torch.Tensor = self._module(inputs_embeds=states[:, None]).logits
        return logits


def _score_head(config: ModelConfig, module: PreTrainedModel) -> ScoreHead | None:
    if not type(module).__name__.endswith(CLASSIFIER):
        return None
    activation = _activation_of(config, module.config)
    if hasattr(module, "score"):  # the module has the head of a causal model
        return ScoreHead(module.score, activation, reads_last=True)
    return ScoreHead(_FirstTokenHead(module), activation, reads_last=False)


def _labels_of(found: PreTrainedConfig) -> tuple[str, ...]:
    """Return the label names, by index, or nothing for a single label, because such models score pairs."""
    if found.num_labels == 1:
        return ()
    return tuple(str(found.id2label[index]) for index in range(found.num_labels))


def _softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.float().softmax(dim=-1)


def _activation_of(config: ModelConfig, found: PreTrainedConfig) -> Activation:
    """Return the function that turns logits into scores, chosen as in sentence-transformers and vLLM.

    Without an activation in config.json, the default is a sigmoid for a single label or for independent labels, and a
    softmax for several exclusive labels, as in transformers' pipelines. Raises UnsupportedModel for other activations.
    """
    named = getattr(found, "sentence_transformers", None) or {}
    name = named.get("activation_fn") or getattr(found, "sbert_ce_default_activation_function", None)
    if name is None and found.num_labels > 1 and found.problem_type != "multi_label_classification":
        return _softmax
    name = str(name or _SIGMOID)
    if name not in _ACTIVATIONS:
        raise UnsupportedModel(
            f"{config.path} computes scores with {name}; only {' and '.join(_ACTIVATIONS)} are supported"
        )
    return _ACTIVATIONS[name]


def _tried_sequences(vocab_size: int) -> tuple[ScheduledSequence, ...]:
    """Return the sequences of the trial batch, of different lengths. The first and longest one is a pair of texts."""
    tried_lengths = (24, 9, 1)  # tokens of each sequence in the trial batch
    step = max(1, vocab_size // (max(tried_lengths) + 1))
    return tuple(
        ScheduledSequence(
            f"tried-{length}", tuple((at + length) * step % vocab_size for at in range(length)), 0, [], False,
            SamplingParams(max_tokens=0), second_text_at=length // 3 if length == max(tried_lengths) else 0,
        )
        for length in tried_lengths
    )  # fmt: skip


def _own_outputs(module: PreTrainedModel) -> list[torch.Tensor]:
    """Run each trial sequence alone, with eager attention. Return its states [num_tokens, hidden_size] or logits."""
    module.set_attn_implementation("eager")
    sequences = _tried_sequences(module.get_input_embeddings().weight.shape[0])
    outputs = []
    for item in sequences:
        given = {"input_ids": torch.tensor([item.token_ids], device=module.device)}
        if has_token_types(module.config):
            given["token_type_ids"] = torch.tensor([token_types(item)], device=module.device)
        output = module(**given)
        outputs.append(output.logits[0] if "logits" in output else output.last_hidden_state[0])
    module.set_attn_implementation(PACKED_ATTENTION_NAME)
    return outputs


def _compare(config: ModelConfig, encoder: Encoder, score: ScoreHead | None, own: list[torch.Tensor]) -> None:
    """Raise UnsupportedModel if the trial sequences' results in one row differ from their results alone (`own`)."""
    sequences = _tried_sequences(encoder.vocab_size)
    try:
        ours = encoder.states(sequences)
    except (UnknownAttention, TypeError) as error:
        raise UnsupportedModel(f"{config.path} cannot run without padding: {first_line(error)}") from error
    theirs = torch.cat(own)
    if score is not None:
        ours = scores_of(ours, sequences, replace(score, activation=_unchanged)).flatten()
    difference = difference_above(_MAX_DIFFERENCES[ours.dtype], ours, theirs, least_size=1e-3)
    if difference is not None:
        raise UnsupportedModel(
            f"{config.path} computes different results without padding than with its own code; the difference is "
            f"{difference}"
        )
