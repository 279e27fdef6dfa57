"""Which settings an engine's backend refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.build import build_sync_engine
from app.config import EngineConfig
from app.errors import InvalidSetup
from app.model.cpu import kv_cache
from app.model.cpu.library import library
from app.model.implementations import native_decoder
from app.model.weights_digest import digest_of_weights
from tests.kit.models import config_of


def int8_config_of(path: Path, *, cache: dict[str, Any] | None = None, **model: Any) -> EngineConfig:
    return config_of(path, cache={"dtype": "int8"} | (cache or {}), **model)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"backend": "torch"}, r"model\.backend is torch"),
        ({"cache": {"block_size": 8}}, r"cache\.block_size is 8, which is not a multiple of 16"),
    ],
)
def test_int8_without_native_attention_is_refused(settings: dict[str, Any], reason: str, tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidSetup, match=rf"cache\.dtype is int8, .*: {reason}\. .* set cache\.dtype to auto"):
        build_sync_engine(int8_config_of(tiny_model_path("llama"), **settings))


def test_int8_without_a_compiler_is_refused(tiny_model_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    for module in (kv_cache, native_decoder):
        monkeypatch.setattr(module, "library", lambda: None)
    with pytest.raises(InvalidSetup, match=r"cache\.dtype is int8, .*the native code could not be built"):
        build_sync_engine(int8_config_of(tiny_model_path("llama")))


@pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
def test_replicas_with_other_kv_memory_do_not_continue_each_others_requests(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    path = tiny_model_path("llama")
    assert digest_of_weights(int8_config_of(path)) != digest_of_weights(config_of(path))
