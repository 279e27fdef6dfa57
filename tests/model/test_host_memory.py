from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from app.config import EngineConfig
from app.errors import InvalidSetup
from app.model import host_memory
from app.model.host_memory import allocating_host_memory, check_host_memory
from app.model.loader import load_runner

WORDS = ("KV memory takes", 3 * 2**30, "set a smaller engine.cache.memory_gib")
BEYOND_ADDRESSES = 2**50  # bytes, of which no process has so many


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """It has 4 GiB, of which 2 are left."""
    monkeypatch.setattr(host_memory, "memory_of_machine", lambda: 4 * 2**30)
    monkeypatch.setattr(host_memory, "available_memory", lambda: 2 * 2**30)
    return monkeypatch


def test_more_than_the_machine_and_its_groups_have_is_refused_with_the_numbers(machine: pytest.MonkeyPatch) -> None:
    check_host_memory(*WORDS)
    machine.setattr(host_memory, "memory_of_machine", lambda: 2**31)
    words = r"KV memory takes 3\.00 GiB \(all\), and this machine and its control groups have 2\.00 GiB: set a smaller"
    with pytest.raises(InvalidSetup, match=words):
        check_host_memory(*WORDS, detail=" (all)")
    with pytest.raises(InvalidSetup, match=r"3\.00 GiB, and"), allocating_host_memory(*WORDS):
        pytest.fail("it was to be refused before")


def test_more_than_is_left_now_is_said_before_it_is_taken(
    machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), allocating_host_memory(*WORDS):
        assert (
            "KV memory takes 3.00 GiB, and this machine and its control groups have 2.00 GiB available" in caplog.text
        )
    caplog.clear()
    for left in (lambda: 3 * 2**30, lambda: None):
        machine.setattr(host_memory, "available_memory", left)
        with allocating_host_memory(*WORDS):
            assert not caplog.text


def test_what_the_allocator_is_refused_is_told_with_the_numbers_and_other_errors_pass(
    machine: pytest.MonkeyPatch,
) -> None:
    words = r"3\.00 GiB.* have 4\.00 GiB, but the system refuses"
    with pytest.raises(InvalidSetup, match=words) as refusal, allocating_host_memory(*WORDS):
        torch.empty(BEYOND_ADDRESSES, dtype=torch.uint8)
    assert "alloc_cpu" not in refusal.value.message
    with pytest.raises(RuntimeError, match="another"), allocating_host_memory(*WORDS):
        raise RuntimeError("another")


@pytest.mark.parametrize("backend", ["auto", "torch"])
@pytest.mark.parametrize(
    ("cache", "words"),
    [
        ({"memory_gib": 2**20}, r"cache\.memory_gib=1048576: KV memory takes 1,048,576\.00 GiB"),
        ({"num_blocks": 2**40}, r"cache\.num_blocks=1099511627776: KV memory takes"),
    ],
)
def test_a_replica_whose_kv_memory_no_system_gives_does_not_start(
    demo_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, cache: dict[str, int], words: str
) -> None:
    config = EngineConfig.model_validate({"model": {"path": str(demo_path), "backend": backend}, "cache": cache})
    with pytest.raises(InvalidSetup, match=f"{words}.* have .* GiB: set a smaller engine.cache.{next(iter(cache))}"):
        load_runner(config)
    monkeypatch.setattr(host_memory, "memory_of_machine", lambda: 2**62)
    with pytest.raises(InvalidSetup, match=f"{words}.*refuses to allocate .* engine.cache.{next(iter(cache))}"):
        load_runner(config)
