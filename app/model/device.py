"""Chooses a model's device and number type, and rejects settings that the device does not support."""

from __future__ import annotations

import importlib.util
import logging
import os
import re
import shutil
import sys
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import torch

from app.config import EngineConfig, ModelConfig
from app.errors import InvalidSetup, first_line
from app.model.architectures import architectures_of, computed_by
from app.model.cpu.library import is_fast
from app.model.cuda.fp8 import why_no_fp8
from app.model.description import read_config

logger = logging.getLogger(__name__)

# Files that exist only on machines, or in containers, with an NVIDIA card.
_SIGNS_OF_A_CARD = (Path("/dev/nvidia0"), Path("/proc/driver/nvidia/version"))


def device_of(config: ModelConfig) -> torch.device:
    """Return the device that the model runs on.

    Raises InvalidSetup if the device does not exist, or if `auto` finds a card that a torch built for CUDA cannot use,
    because falling back to the CPU would hide a broken installation.
    """
    if config.device == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        sign = None if torch.version.cuda is None else _sign_of_a_card()
        if config.device == "auto" and sign is None:
            return torch.device("cpu")
        card = "" if sign is None else f" and there is a GPU here ({sign})"
        raise InvalidSetup(
            f"model.device is {config.device}{card}, but torch sees no CUDA device: {_why_no_cuda()}; or set "
            f"model.device: cpu"
        )
    return torch.device("cuda")


def _sign_of_a_card() -> str | None:
    """Return a file that shows that there is a card, or None if there is none or the environment hides all cards."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return None
    return next((str(each) for each in _SIGNS_OF_A_CARD if each.exists()), shutil.which("nvidia-smi"))


def _why_no_cuda() -> str:
    """Return the reason why torch finds no device, and a remedy. torch reports it only when it initialises CUDA."""
    version, built_for = torch.__version__, torch.version.cuda
    if built_for is None:
        return f"torch {version} is built without CUDA; install torch with CUDA"
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        reason = "it has none"
    except (RuntimeError, AssertionError) as error:
        reason = first_line(error).rstrip(".")
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
    # Source: https://docs.nvidia.com/cuda/cuda-toolkit-release-notes, minor version compatibility.
    return (
        f"{reason} (the driver is {driver_version()}, CUDA_VISIBLE_DEVICES is {visible!r}). torch {version} is built "
        f"for CUDA {built_for}; CUDA 12 needs driver 525 or newer, CUDA 13 needs 580: update the driver, or install "
        f"torch for an older CUDA (https://pytorch.org/get-started/previous-versions)"
    )


def driver_version() -> str:
    """Return the version of the NVIDIA driver. Also works in containers, which share the host's driver."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", _SIGNS_OF_A_CARD[1].read_text())
    except OSError:
        return "not loaded"
    return "unknown" if found is None else found[0]


def why_no_triton(device: torch.device) -> str | None:
    """Return the predicate of a sentence about Triton, with the missing package and a remedy, or None.

    Triton needs a C compiler: it builds a launcher for each of its kernels, see `triton/runtime/build.py`.
    """
    if device.type != "cuda":
        return None  # Triton's interpreter needs no compiler
    if importlib.util.find_spec("triton") is None:
        return "is not installed: pip install triton (on Linux, torch with CUDA includes it)"
    compilers = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "clang"]
    header = Path(sysconfig.get_path("include", "posix_prefix"), "Python.h")
    missing = [] if any(map(shutil.which, compilers)) else [f"a C compiler ({' or '.join(compilers)})"]
    missing += [] if header.is_file() else [f"Python's headers ({header})"]
    if not missing:
        return None
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    return (
        f"lacks {' and '.join(missing)}, which it needs to compile launchers for its kernels: apt-get install -y gcc "
        f"libc6-dev {python}-dev, or dnf install -y gcc {python}-devel"
    )


def warn_without_mps(share: float) -> None:
    """Warn if replicas share a card without the Multi-Process Service (MPS), so that they take turns."""
    control = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")
    if not control.exists():
        logger.warning(
            "replicas.num_gpus is %g, but MPS is not running here (%s), so this GPU's replicas take turns on it and "
            "may together be slower than one replica with num_gpus: 1. Start nvidia-cuda-mps-control -d before Ray",
            share, control,
        )  # fmt: skip


class ChosenDtype(NamedTuple):
    """The number type of weights and KV memory, with the reason for the choice, to log."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def dtype_of(config: ModelConfig, location: str) -> ChosenDtype:
    """Return the configured type; for `auto`, bfloat16 on CUDA, and the checkpoint's type on a CPU if that is fast.

    Raises InvalidSetup like `device_of`.
    """
    if config.dtype != "auto":
        return ChosenDtype(torch.float32 if config.dtype == "float32" else torch.bfloat16, "set by model.dtype")
    if device_of(config).type == "cuda":
        return ChosenDtype(torch.bfloat16, "it runs on CUDA")
    try:
        described = read_config(config, location)
    except InvalidSetup:  # raised with more detail when the model is loaded
        described = {}
    text = described.get("text_config") or described
    own = next((each[key] for each in (described, text) for key in ("dtype", "torch_dtype") if each.get(key)), None)
    if own == "bfloat16":
        reason = _why_not_bfloat16(config, described)
        if reason is None:
            return ChosenDtype(torch.bfloat16, "the checkpoint's own, in which the native code is fast on this CPU")
        return ChosenDtype(torch.float32, f"the checkpoint is in bfloat16, but {reason}")
    if own == "float16":  # bfloat16 has only 8 of float16's 11 significant bits
        return ChosenDtype(torch.float32, "the checkpoint is in float16, which bfloat16 would round")
    return ChosenDtype(
        torch.float32, "the checkpoint's own" if own == "float32" else "the checkpoint specifies no other"
    )


def _why_not_bfloat16(config: ModelConfig, described: dict[str, Any]) -> str | None:
    if config.backend != "auto":
        return "it runs on transformers' code (model.backend is torch)"
    architectures = architectures_of(described) or ["a model without a name"]
    if not computed_by("cpu").issuperset(architectures):
        return f"{', '.join(architectures)} runs on transformers' code"
    return None if is_fast(torch.bfloat16) else "the native code is not fast in it on this CPU"


def refused_quantization(config: ModelConfig, reason: str) -> InvalidSetup:
    """Return the error for a model whose backend does not support the configured quantization."""
    return InvalidSetup(
        f"model.quantization is {config.quantization}, which only {config.quantised_by} supports; "
        f"{config.path} cannot run there: {reason}. Set model.quantization to none"
    )


def check_backend_on_cpu(config: ModelConfig) -> None:
    """Raise InvalidSetup if the settings ask for a GPU backend."""
    if config.backend not in ("auto", "torch"):
        raise InvalidSetup(
            f"model.backend is {config.backend}, which needs a GPU, but {config.path} runs on a CPU; remove it"
        )


def check_kv_device(config: EngineConfig, device: torch.device) -> None:
    """Raise InvalidSetup if no attention on the device supports `cache.dtype`. Works before weights are loaded."""
    if config.cache.dtype == "fp8":
        _refuse_kv_dtype(config, why_no_fp8(device, on_a_cpu="cache.dtype: int8"))
    if config.cache.dtype == "int8" and device.type != "cpu":
        _refuse_kv_dtype(config, f"it runs on {device.type}")


def check_kv_dtype(config: EngineConfig, device: torch.device, why_no_native_attention: str | None) -> None:
    """Raise InvalidSetup if a loaded model's attention does not support `cache.dtype`."""
    check_kv_device(config, device)
    if config.cache.dtype == "int8":
        _refuse_kv_dtype(config, why_no_native_attention)


def _refuse_kv_dtype(config: EngineConfig, reason: str | None) -> None:
    if reason is None:
        return
    only = "native attention on a CPU" if config.cache.dtype == "int8" else "Triton's attention on a GPU"
    raise InvalidSetup(
        f"cache.dtype is {config.cache.dtype}, which only {only} supports; {config.model.path} does not use it here: "
        f"{reason}. Change that, or set cache.dtype to auto"
    )
