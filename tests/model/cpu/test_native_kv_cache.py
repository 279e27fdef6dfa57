from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch

from app.model.cpu import kv_cache
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import Team, library
from app.model.kv_cache import LayerShape

pytestmark = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")
NUM_BYTES = 64 * 2**20


@pytest.fixture
def cache() -> NativeKVCache:
    layers = dict.fromkeys(range(2), LayerShape(num_kv_heads=2, key_dim=64, value_dim=64))
    return NativeKVCache(layers, num_blocks=NUM_BYTES // (2 * 16 * 2 * 128 * 2), block_size=16, dtype=torch.bfloat16)


def private_bytes() -> int:
    [kilobytes] = re.findall(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(kilobytes) * 1024


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_of_it_is_provided_at_once(num_threads: int, cache: NativeKVCache) -> None:
    before = private_bytes()
    cache.provide(Team(num_threads))
    assert private_bytes() - before > 0.95 * NUM_BYTES


def test_more_than_the_machine_has_is_left_to_be_used(
    cache: NativeKVCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_cache, "_available_bytes", lambda: NUM_BYTES // 4)
    before = private_bytes()
    with caplog.at_level(logging.WARNING):
        cache.provide(Team(1))
    assert private_bytes() - before < 0.5 * NUM_BYTES
    assert "KV memory is 0.06 GiB, of which the machine has 0.02 GiB now" in caplog.text
