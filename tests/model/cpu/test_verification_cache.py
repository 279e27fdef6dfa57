from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from app.errors import InvalidSetup
from app.model.cpu.library import is_fast
from app.model.implementations import transformers_code
from tests.kit.models import load

pytestmark = pytest.mark.skipif(not is_fast(torch.float32), reason="this CPU cannot compute the native decoder")


def is_checked_again(path: Path, checks: Path, monkeypatch: pytest.MonkeyPatch) -> bool:
    probed: list[object] = []
    right = transformers_code._verified_reference
    with monkeypatch.context() as patch:
        patch.setattr(transformers_code, "_verified_reference", lambda *given: probed.append(given) or right(*given))  # type: ignore[func-returns-value]
        load(path, checks=checks)
    return bool(probed)


def test_it_is_loaded_without_the_model_code_of_transformers(model_path: Path, tmp_path: Path) -> None:
    load(model_path, checks=tmp_path)
    code = f"""
import sys
from pathlib import Path
from app.config import ModelConfig
from app.model.loader import load_model
load_model(ModelConfig(path="m", device="cpu", dtype="float32"), {str(model_path)!r}, checks=Path({str(tmp_path)!r}))
assert not {{"transformers.modeling_utils", "torch._dynamo", "sympy", "pandas"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"PYTHONPATH": os.getcwd()})


def test_other_files_of_the_model_are_checked_again(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_checked_again(model_path, tmp_path, monkeypatch)
    assert not is_checked_again(model_path, tmp_path, monkeypatch)
    config = json.loads((model_path / "config.json").read_text())
    (model_path / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-5}))
    assert is_checked_again(model_path, tmp_path, monkeypatch)
    weights = model_path / "model.safetensors"
    content = weights.read_bytes()
    weights.unlink()
    weights.write_bytes(content)
    os.utime(weights, ns=(1, 1))
    assert is_checked_again(model_path, tmp_path, monkeypatch)


def test_a_file_that_cannot_be_read_is_no_check(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load(model_path, checks=tmp_path)
    [kept] = tmp_path.glob("verified-*.json")
    kept.write_text(kept.read_text()[:40])
    assert is_checked_again(model_path, tmp_path, monkeypatch)
    assert not is_checked_again(model_path, tmp_path, monkeypatch)


def test_weights_that_transformers_reads_otherwise_are_checked_at_every_load(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.model.cpu.checkpoint.Checkpoint.has_weights_of", lambda *_: False)
    load(model_path, checks=tmp_path)
    assert not list(tmp_path.glob("verified-*"))


def test_a_model_on_the_code_of_transformers_is_checked_at_every_load(tiny_model_path, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    load(tiny_model_path("gpt_neox"), checks=tmp_path)
    load(tiny_model_path("llama"), checks=tmp_path, backend="torch")
    assert not list(tmp_path.iterdir())


def test_the_length_that_is_asked_for_is_compared_with_the_models_own(model_path: Path, tmp_path: Path) -> None:
    longest = load(model_path, checks=tmp_path, max_model_len=16).model_info.max_model_len
    assert longest == 16
    assert load(model_path, checks=tmp_path).model_info.max_model_len > 16
    with pytest.raises(InvalidSetup, match="accepts at most"):
        load(model_path, checks=tmp_path, max_model_len=1_000_000)
