"""Tiny random models on disk, made once for all tests of this room."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """architecture → folder with its tiny model."""
    from tests.tiny_models import save_tiny_model  # some tests need no transformers, which takes seconds to import

    root = tmp_path_factory.mktemp("models")

    def path(architecture: str) -> Path:
        folder = root / architecture
        return folder if folder.exists() else save_tiny_model(architecture, folder)

    return path


@pytest.fixture
def model_path(tiny_model_path: Callable[[str], Path], tmp_path: Path) -> Path:
    """A Llama's folder that a test may change."""
    return Path(shutil.copytree(tiny_model_path("llama"), tmp_path / "model"))


@pytest.fixture
def equal_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, matrix products by row: numpy's BLAS rounds some rows differently by their place."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def create_dot(_self: object, a, b, c, *_options: object) -> TensorHandle:  # type: ignore[no-untyped-def]
        return TensorHandle((a.data[:, :, None] * b.data[None]).sum(1) + c.data, c.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


@pytest.fixture
def rounded_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, FP8 as GPUs round it: its own conversion loses what is carried into the exponent."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    own = InterpreterBuilder.create_fp_to_fp

    def create_fp_to_fp(self: object, source, dst_type, rounding_mode) -> TensorHandle:  # type: ignore[no-untyped-def]
        kinds = (source.dtype.scalar, dst_type.scalar)
        if kinds == (tl.float32, tl.float8e4nv):
            rounded = torch.from_numpy(source.data.copy()).to(torch.float8_e4m3fn)
            return TensorHandle(rounded.view(torch.uint8).numpy(), dst_type.scalar)
        if kinds == (tl.float8e4nv, tl.float32):
            stored = torch.from_numpy(source.data.copy()).view(torch.float8_e4m3fn)
            return TensorHandle(stored.float().numpy(), dst_type.scalar)
        return own(self, source, dst_type, rounding_mode)

    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", create_fp_to_fp)
