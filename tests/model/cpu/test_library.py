"""The native library where it can be built, where it cannot, and when it is there already."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.assembly import build_sync_engine
from app.config import EngineConfig, ModelConfig
from app.model.attention import TorchAttention
from app.model.cpu import kv_cache, library
from app.model.forward import TransformersForward


def test_without_a_compiler_plain_torch_serves(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: None)
    build = library.library.__wrapped__
    for module in (library, kv_cache):
        monkeypatch.setattr(module, "library", build)
    engine = build_sync_engine(EngineConfig(model=ModelConfig(path=str(demo_path), device="cpu")))
    forward = engine.runner.forward  # type: ignore[attr-defined]
    assert type(forward) is TransformersForward
    assert type(forward.attention) is TorchAttention
    assert "no C++ compiler found" in caplog.text


def test_a_failing_compiler_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda name: "/bin/false")
    assert library.library.__wrapped__() is None
    assert "cannot be built" in caplog.text


def test_it_is_built_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a compiler that only notes its calls. Every test of native code uses what the real one builds."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    compiler, calls = tmp_path / "c++", tmp_path / "calls"
    compiler.write_text(f'#!/bin/sh\necho "$1" >> {calls}\n')
    compiler.chmod(0o755)
    built = library._built(str(compiler))
    assert built.exists()
    assert library._built(str(compiler)) == built
    assert [call == "--version" for call in calls.read_text().splitlines()] == [True, False, True]
