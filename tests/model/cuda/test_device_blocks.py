"""Blocks of a GPU's KV memory that other threads copy: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from app.build import build_sync_engine
from app.config import ReplicasConfig
from app.engine.engine import Engine
from app.engine.request import PrefixSource, Request
from tests.kit.engine import Outcome, make_request
from tests.kit.models import DEVICE, config_of
from tests.waiting import PATIENCE_S

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.device_blocks import DeviceBlocks
from app.model.cuda.fp8 import FP8

NUM_BLOCKS = 5
SHAPES = [((4, 2, 8), torch.bfloat16), ((4, 2, 24), torch.bfloat16), ((2, 2, 4), torch.float32), ((4, 2, 8), FP8)]


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.flatten(1).view(torch.uint8)


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    """As of layers with keys, values and scales of other sizes, one of them larger than a tile."""
    sizes = [*SHAPES, ((16, 8, 72), torch.bfloat16)]
    memory = [torch.zeros(NUM_BLOCKS, *size, dtype=dtype, device=DEVICE) for size, dtype in sizes]
    for each in memory:
        bytes_of(each).copy_(torch.randint(256, bytes_of(each).shape, dtype=torch.uint8))
    return memory


def test_a_block_is_the_bytes_of_all_tensors_one_after_the_other(tensors: list[torch.Tensor]) -> None:
    before = [bytes_of(each).cpu().clone() for each in tensors]
    blocks = DeviceBlocks(tensors)
    buffer = blocks.new_buffer()
    assert len(buffer) == blocks.block_bytes == sum(each.shape[1] for each in before)
    with blocks.copies() as copies:
        assert copies.take(3, buffer)
        assert bytes(buffer) == torch.cat([each[3] for each in before]).numpy().tobytes()
        assert copies.put(1, buffer)
    for each, was in zip(tensors, before, strict=True):
        was[1] = was[3]
        assert torch.equal(bytes_of(each).cpu(), was), "and nothing else has changed"


def test_memory_that_is_given_up_is_not_touched(tensors: list[torch.Tensor]) -> None:
    blocks = DeviceBlocks(tensors)
    buffer = blocks.new_buffer()
    with blocks.copies() as copies:
        blocks.suspend()
        assert not blocks.is_there
        assert not copies.take(0, buffer)
        assert not copies.put(0, buffer)
        blocks.resume()
        assert copies.take(0, buffer)


@pytest.fixture
def engines(
    small_path: Path, tmp_path: Path, triton_here: None, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Iterator[Engine]]:
    """Engines that launch ahead, with one folder beside their KV memory."""
    monkeypatch.setattr("app.kv_tiers.tier_store.TierStore.min_tokens", 0)
    monkeypatch.setattr("app.engine.fetches.MIN_PATIENCE_S", PATIENCE_S)  # on a busy machine computing may be quicker
    replicas = ReplicasConfig(num_replicas=2, fetch_prefixes=True)
    made: list[Engine] = []

    def more() -> Iterator[Engine]:
        cache = {"block_size": 4, "num_blocks": 14, "tiers": [{"path": str(tmp_path), "max_gib": 0.01}]}
        scheduler = {"max_running": 3, "max_step_tokens": 16, "prefill_chunk_tokens": 8}
        config = config_of(small_path, cache=cache, scheduler=scheduler, device=DEVICE.type, dtype="float32")
        while True:
            made.append(build_sync_engine(config, replicas))
            yield made[-1]

    yield more()
    for engine in made:
        engine.close()


def requests(seed: int) -> list[Request]:
    """Of few beginnings: what one needs was often evicted by another."""
    chance = random.Random(seed)
    beginnings = [tuple(chance.randrange(3, 60) for _ in range(16)) for _ in range(3)]
    return [
        make_request((*chance.choice(beginnings), 3 + n), max_tokens=4, ignore_eos=True, temperature=0.8, seed=n)
        for n in range(4)
    ]


def answers(engine: Engine, *asked: Request) -> list[list[int]]:
    outcome = Outcome()
    for each in asked:
        engine.add(each)
    while engine.has_work:
        if engine.idle_s:
            time.sleep(0.001)  # a fetch is under way, in Python too
        outcome.book(engine.step())
    return [outcome.token_ids[each.request_id] for each in asked]


def settled(engine: Engine, *asked: Request) -> tuple[list[list[int]], int]:
    """The tokens of requests that come one after the other, and how many tokens were fetched for them."""
    fetches = engine._scheduler.fetches
    before, found = fetches.num_tokens, list[list[int]]()
    for each in asked:
        found += answers(engine, each)
        if fetches.store is not None:
            fetches.store.settle(PATIENCE_S)
    return found, fetches.num_tokens - before


def test_an_engine_that_launches_ahead_fetches_what_was_evicted_and_what_is_there_at_its_start(
    engines: Iterator[Engine], small_path: Path
) -> None:
    first = next(engines)
    assert first.runner.launches
    asked = requests(seed=1)
    config = config_of(small_path, cache={"block_size": 4, "num_blocks": 60}, device=DEVICE.type, dtype="float32")
    expected, _ = settled(build_sync_engine(config), *asked)
    assert settled(first, *asked)[0] == expected
    assert settled(first, *requests(seed=2), *asked)[0][-len(asked) :] == expected
    assert first._scheduler.fetches.num_tokens > 0, "what was evicted"
    second = next(engines)
    found, num_fetched = settled(second, *asked)
    assert found == expected
    assert num_fetched > 0, "what the first has left"


def test_requests_at_once_have_the_same_tokens_with_a_folder(engines: Iterator[Engine], small_path: Path) -> None:
    config = config_of(small_path, cache={"block_size": 4, "num_blocks": 60}, device=DEVICE.type, dtype="float32")
    engine, without = next(engines), build_sync_engine(config)
    for seed in (1, 2):
        asked = requests(seed)
        assert answers(engine, *asked) == answers(without, *asked)


def test_asleep_it_copies_nothing_and_afterwards_it_fetches(engines: Iterator[Engine]) -> None:
    engine, asked = next(engines), requests(seed=1)
    expected, _ = settled(engine, *asked)
    engine.sleep()
    assert engine.runner.kv_memory() is None
    engine.wake()
    found, num_fetched = settled(engine, *asked)
    assert found == expected
    assert num_fetched > 0


def test_a_replica_goes_on_with_the_prefix_of_another(engines: Iterator[Engine]) -> None:
    first, second = next(engines), next(engines)
    address = first.serve_prefixes("127.0.0.1")
    assert address is not None
    request = make_request(tuple(range(3, 30)), max_tokens=6, ignore_eos=True, temperature=0.8, seed=1)
    expected = answers(first, request)
    assert answers(second, replace(request, prefix_at=PrefixSource(address, 6))) == expected
    store = second._scheduler.fetches.store
    assert store is not None
    assert store.stats().num_received + store.stats().num_read == 6, "of seven blocks, without the last token's"
