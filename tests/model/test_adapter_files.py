from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest

from app.build import build_sync_engine
from app.errors import UnsupportedAdapter
from app.model.adapter_files import another_base
from tests.kit.models import config_of
from tests.lora import save_adapter
from tests.tiny_models import build_tiny_model

SERVED = ["/models/Llama-3.2-1B.Q4_K_M.gguf", "meta-llama/Llama-3.2-1B"]


@pytest.mark.parametrize(
    ("named", "difference"),
    [
        ({}, None),
        ({"base_model_name_or_path": None}, None),
        ({"base_model_name_or_path": "/home/me/Llama-3.2-1B/"}, None),
        ({"base_model_name_or_path": "C:\\models\\llama-3.2-1b"}, None),
        (
            {"base_model_name_or_path": "meta-llama/Llama-3.2-1B-Instruct"},
            "it was trained on meta-llama/Llama-3.2-1B-Instruct, but /models/Llama-3.2-1B.Q4_K_M.gguf is served",
        ),
        ({"base_model_name_or_path": "meta-llama/Llama-3.2-1B", "revision": "a1"}, None),
        (
            {"base_model_name_or_path": "meta-llama/Llama-3.2-1B", "revision": "b2"},
            "it was trained on revision b2 of meta-llama/Llama-3.2-1B, but a1 is served",
        ),
    ],
)
def test_the_name_of_another_base_is_seen(named: dict[str, object], difference: str | None, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4} | named))
    assert another_base(tmp_path, SERVED, "a1") == difference


def test_files_that_are_replaced_while_an_adapter_is_loaded_are_not_taken_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    engine = build_sync_engine(config_of(tmp_path / "base", cache={"num_blocks": 8}))
    adapter, other = (save_adapter(tmp_path / name, model, seed=seed) for name, seed in (("own", 1), ("other", 2)))
    load_adapter = engine.runner.load_adapter

    def replaced(folder: Path, make_room: Callable[[], None]) -> object:
        (folder / "adapter_model.safetensors").unlink()
        (tmp_path / "other" / "adapter_model.safetensors").rename(folder / "adapter_model.safetensors")
        return load_adapter(folder, make_room)

    monkeypatch.setattr(engine.runner, "load_adapter", replaced)
    assert engine.adapters is not None
    with pytest.raises(UnsupportedAdapter, match=rf"has digest {other.digest} here, but {adapter.digest} where it was"):
        engine.adapters.hold(adapter)
    assert engine.adapters.stats().loaded == ()


def test_an_adapter_of_another_base_of_equal_sizes_is_loaded_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = build_tiny_model("llama")
    model.save_pretrained(tmp_path / "base")
    store = build_sync_engine(config_of(tmp_path / "base", cache={"num_blocks": 8})).adapters
    assert store is not None
    for name, base in (("own", str(tmp_path / "base")), ("other", "some-org/other")):
        store.hold(save_adapter(tmp_path / name, model, base_model_name_or_path=base)).release()
    warnings = [
        each.message for each in caplog.records if each.levelno == logging.WARNING and "adapter" in each.message
    ]
    assert warnings == [
        "the adapter other has the right sizes, but it was trained on some-org/other, "
        f"but {tmp_path / 'base'} is served"
    ]
