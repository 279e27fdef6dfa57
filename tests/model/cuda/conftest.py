"""Less work for Triton's interpreter, which takes milliseconds for a program that a GPU runs in microseconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from app.model.crash_notes import close_note
from app.model.cuda.attention import TritonAttention
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.implementations.cuda_decoder import CudaModel
from benchmarks.gpu.graphs import LIBRARY
from tests.kit.interpreter import quicken_interpreter
from tests.tiny_models import build_tiny_model


@pytest.fixture(scope="module", autouse=True)
def _quick_interpreter() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        quicken_interpreter(patch)
        yield


@pytest.fixture(scope="module", autouse=True)
def _short_probe() -> Iterator[None]:
    """Models are compared at load with fewer tokens, and replays not at all.

    Tests of these comparisons are in `test_loader.py` and `test_gpu_backends.py`.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("app.model.verification.NUM_TOKENS", 6)
        patch.setattr(GraphModelRunner, "_difference_of_replays", lambda runner: None)
        yield


@pytest.fixture(scope="session")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of one layer with one KV head, for what is around the layers."""
    path = tmp_path_factory.mktemp("small")
    build_tiny_model("llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1).save_pretrained(path)
    return path


@pytest.fixture
def unverified(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decoder is not compared at load, where the test itself compares what it computes, or computes nothing."""
    monkeypatch.setattr(CudaModel, "output", lambda model, source: model.reference.own)


@pytest.fixture
def triton_here(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An engine takes our kernels on this machine, and captures only where there is a GPU."""
    monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda device: device.type != "meta"))
    if not torch.cuda.is_available():
        monkeypatch.setattr("app.model.implementations.gpu.CudaCapture", lambda device: lambda function: function)
    yield
    close_note()


@pytest.fixture
def library_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's FlashAttention has a stand-in where there is no GPU, which computes in any type."""
    if not torch.cuda.is_available():
        for name, replacement in LIBRARY.items():
            monkeypatch.setattr(f"app.model.cuda.library_attention.{name}", replacement)
