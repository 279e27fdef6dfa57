"""Which device computes a model, in which type, and what it cannot have."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from app.config import EngineConfig, ModelConfig
from app.errors import InvalidSetup
from app.model.cpu.library import is_fast
from app.model.cuda.attention import TritonAttention
from app.model.cuda.fp8 import why_no_fp8
from app.model.description import read_config
from app.model.llama import ARCHITECTURES


def device_of(config: ModelConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise InvalidSetup("model.device is cuda, but torch sees no CUDA device; use cpu, or install a CUDA torch")
    device = torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
    if device.type == "cuda" and not TritonAttention.fits(device):
        raise InvalidSetup(
            f"model.device is {config.device} and torch sees a CUDA device, but Triton, in which attention is written, "
            f"is not installed: pip install triton (torch for CUDA brings it on Linux), or set model.device: cpu"
        )
    return device


class ChosenDtype(NamedTuple):
    """A type of weights and KV memory, and why it is that."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def dtype_of(config: ModelConfig, location: str) -> ChosenDtype:
    """As configured; else bfloat16 on CUDA, and on a CPU the checkpoint's own where the native code is fast in it.

    Raises:
        InvalidSetup: there is no such device, or it has no Triton.
    """
    if config.dtype != "auto":
        return ChosenDtype(torch.float32 if config.dtype == "float32" else torch.bfloat16, "model.dtype says so")
    if device_of(config).type == "cuda":
        return ChosenDtype(torch.bfloat16, "it runs on CUDA")
    try:
        described = read_config(config, location)
    except InvalidSetup:  # said when the model is loaded, with more
        described = {}
    text = described.get("text_config") or described
    own = next((each[key] for each in (described, text) for key in ("dtype", "torch_dtype") if each.get(key)), None)
    if own == "bfloat16":
        reason = _why_not_bfloat16(config, described)
        if reason is None:
            return ChosenDtype(torch.bfloat16, "the checkpoint's own, in which the native code is fast on this CPU")
        return ChosenDtype(torch.float32, f"the checkpoint is in bfloat16, but {reason}")
    if own == "float16":  # bfloat16 has 8 bits of its 11
        return ChosenDtype(torch.float32, "the checkpoint is in float16, which bfloat16 would round")
    return ChosenDtype(torch.float32, "the checkpoint's own" if own == "float32" else "the checkpoint names no other")


def _why_not_bfloat16(config: ModelConfig, described: dict[str, Any]) -> str | None:
    if config.backend != "auto":
        return "transformers' code computes it (model.backend is torch)"
    architectures = described.get("architectures") or ["a model without a name"]
    if not ARCHITECTURES.issuperset(architectures):
        return f"transformers' code computes {', '.join(architectures)}"
    return None if is_fast(torch.bfloat16) else "the native code is not fast in it on this CPU"


def refused_quantization(config: ModelConfig, reason: str) -> InvalidSetup:
    """What to raise where weights cannot be quantised as the settings say."""
    return InvalidSetup(
        f"model.quantization is {config.quantization}, which only {config.quantised_by} computes; "
        f"{config.path} cannot run there: {reason}. Set model.quantization to none"
    )


def check_kv_device(config: EngineConfig, device: torch.device) -> None:
    """Raises InvalidSetup if no attention on a device has the KV memory of `cache.dtype`. Needs no weights."""
    if config.cache.dtype == "fp8":
        _refuse_kv_dtype(config, why_no_fp8(device, on_a_cpu="cache.dtype: int8"))
    if config.cache.dtype == "int8" and device.type != "cpu":
        _refuse_kv_dtype(config, f"it runs on {device.type}")


def check_kv_dtype(config: EngineConfig, device: torch.device, why_no_native_attention: str | None) -> None:
    """The same for a model that has been loaded."""
    check_kv_device(config, device)
    if config.cache.dtype == "int8":
        _refuse_kv_dtype(config, why_no_native_attention)


def _refuse_kv_dtype(config: EngineConfig, reason: str | None) -> None:
    if reason is None:
        return
    only = "native attention on a CPU" if config.cache.dtype == "int8" else "Triton's attention on a GPU"
    raise InvalidSetup(
        f"cache.dtype is {config.cache.dtype}, which only {only} has; {config.model.path} does not use that here: "
        f"{reason}. Change that, or set cache.dtype to auto"
    )
