"""Loads a model by the first way to compute that can, verified by transformers' code. `ways/` has a file for each."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from app.config import ModelConfig
from app.model.cuda.attention import TritonAttention
from app.model.device import device_of, dtype_of, refused_quantization
from app.model.parallel.group import RankGroup
from app.model.source import ModelSource
from app.model.ways.cuda_decoder import CudaModel
from app.model.ways.loaded_model import LoadedModel
from app.model.ways.native_decoder import NativeModel
from app.model.ways.transformers_code import TransformersModel

logger = logging.getLogger(__name__)


@torch.inference_mode()
def load_model(
    config: ModelConfig,
    location: str,
    *,
    block_size: int = 16,
    checks: Path | None = None,
    group: RankGroup | None = None,
) -> LoadedModel:
    """Load weights from safetensors and try one short forward pass. Code from a model repository never runs.

    block_size: of the KV memory; native code supports only some sizes.
    checks: a folder that keeps which models in local folders have been verified; they are not tried again. It also has
        the locks of weights that are shared with other processes.
    group: the ranks that have a part of the model each; all call this function.

    Raises:
        InvalidSetup: there is no such model, or no such device, or the model cannot be quantised as asked.
        UnsupportedModel: it is not a decoder-only model with an attention that can be paged; the message says why.
    """
    chosen = dtype_of(config, location)
    source = ModelSource(
        config=config, location=location, device=device_of(config), dtype=chosen.dtype, block_size=block_size,
        cache=checks, group=group,
    )  # fmt: skip
    way = _decoder_for(config, source.device)
    reason = way.why_not_here(source)
    if reason is not None and config.quantization != "none":
        raise refused_quantization(config, reason)
    logger.info("%s: the type is %s: %s", config.path, chosen.name, chosen.reason)
    if reason is not None:
        return _on_transformers_code(source, TransformersModel.load(source), reason)
    if way is NativeModel and (verified := NativeModel.load_verified(source)) is not None:
        return verified
    own = TransformersModel.load(source, from_files=way is NativeModel or config.quantization == "fp8")
    reason = way.why_not(source, own)
    if reason is None:
        return _verified(way, source, own) or own.ready(source)
    if config.quantization != "none":
        raise refused_quantization(config, reason)
    return _on_transformers_code(source, own, reason)


def _decoder_for(config: ModelConfig, device: torch.device) -> type[CudaModel | NativeModel]:
    """The fast way on a device, for the models that it knows."""
    if config.quantization != "none":
        return CudaModel if config.quantization == "fp8" else NativeModel
    return CudaModel if TritonAttention.fits(device) else NativeModel


def _on_transformers_code(source: ModelSource, own: TransformersModel, reason: str) -> TransformersModel:
    logger.info("%s runs on transformers' code: %s", source.config.path, reason)
    return own.ready(source)


def _verified(
    way: type[CudaModel | NativeModel], source: ModelSource, own: TransformersModel
) -> CudaModel | NativeModel | None:
    """The model loaded by a way; None, with the reason in the log, if that computes something else.

    Of ranks all call it; where one finds a difference, none has this way.
    """
    expected = own.expected.behind_head(own.module, num_layers=len(own.layers))
    model = way.load(source, own, expected)
    difference = expected.difference(model.output(source), source.config.quantization)
    if source.group is not None and not source.group.minimum(int(difference is None)):
        difference = difference or "the output differs on another rank"
    if difference is None:
        return model.when_verified(source, own)
    if source.config.quantization != "none":
        raise refused_quantization(source.config, difference)
    logger.warning("%s runs on transformers' code, slower: in %s %s", source.config.path, way.name, difference)
    return None
