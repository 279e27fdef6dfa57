"""A thread that moves blocks between memory and a folder, beside an engine that goes on."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from app.build import build_sync_engine
from app.config import TierConfig
from app.engine.block_pool import BlockPool
from app.engine.block_store import Fetch, name_of, name_of_snapshot
from app.engine.engine import Engine
from app.engine.prefix import Block, Prefix
from app.engine.request import Request
from app.engine.state_pool import StatePool
from app.errors import InvalidSetup
from app.kv_tiers.folder import BlockFolder
from app.kv_tiers.tier_store import TierStore, open_folder, this_minute
from app.model.host_blocks import HostBlocks
from tests.kit.engine import Outcome, make_request
from tests.kit.models import config_of
from tests.model.test_recurrent_layers import HYBRIDS
from tests.tiny_models import VOCAB_SIZE, save_random_model
from tests.waiting import PATIENCE_S, eventually

NAMESPACE = bytes(16)
NUM_BLOCKS, BLOCK_BYTES, SIZE = 8, 32, 2
NUM_SLOTS, STATE_BYTES = 6, 80


class Side:
    """A pool, its memory of two tensors, and its store; with slots for states as of a layer, if wanted."""

    def __init__(self, path: Path, *, has_states: bool = False) -> None:
        states = StatePool(NUM_SLOTS, interval_tokens=SIZE) if has_states else None
        self.pool = BlockPool(num_blocks=NUM_BLOCKS, block_size=SIZE, states=states)
        self.tensors = [torch.zeros(NUM_BLOCKS, BLOCK_BYTES, dtype=torch.uint8) for _ in range(2)]
        self.states = torch.zeros(NUM_SLOTS, STATE_BYTES, dtype=torch.uint8)
        self.memory = HostBlocks(self.tensors, [self.states] if has_states else [])
        self.folder = BlockFolder(path, namespace=NAMESPACE, max_bytes=1 << 20)
        self.store = TierStore(self.folder, lambda: self.memory, namespace=NAMESPACE)
        if not has_states:
            self.pool.on_cached = self.store.offer

    def fill(self, block: Block, value: int) -> None:
        for tensor in self.tensors:
            tensor[block.block_id] = value

    def content(self, block: Block) -> set[int]:
        return {value for tensor in self.tensors for value in tensor[block.block_id].tolist()}

    def computed(self, num_blocks: int, salt: str = "") -> list[Block]:
        """Blocks of a prefix, filled with their places and freed."""
        blocks = self.pool.allocate(num_blocks)
        parent: Prefix | str = salt
        for place, block in enumerate(blocks):
            self.fill(block, place + 1)
            parent = self.pool.cache_full_block(block, [place] * SIZE, parent=parent)
        self.pool.free(blocks)
        return blocks

    def snapshots(self, blocks: list[Block], *numbers: int) -> None:
        """Have snapshots behind so many of these blocks, filled with 100 and their number, and offer them."""
        assert self.pool.states is not None, "it has states"
        for number in numbers:
            slot, prefix = self.pool.states.reserve(), blocks[number - 1].prefix
            assert slot is not None
            assert prefix is not None
            self.states[slot] = 100 + number
            self.pool.states.take_back(slot, prefix, number * SIZE)
            self.store.offer(prefix)
        self.store.settle(PATIENCE_S)

    def found(self, names: list[bytes]) -> int:
        return self.store.lookup(names, make_request(), num_before=0)

    def fetched(self, names: list[bytes], request: Request | None = None) -> tuple[list[Block], Fetch]:
        token_ids = [(place,) * SIZE for place in range(len(names))]
        slot = None if self.pool.states is None else self.pool.states.reserve()
        fetch = Fetch(
            request or make_request(),
            blocks=self.pool.allocate(len(names)),
            names=names,
            token_ids=token_ids,
            slot=slot,
        )
        self.store.begin(fetch)
        return list(fetch.blocks), fetch

    def state_of(self, fetch: Fetch) -> set[int]:
        """The values in its slot."""
        return set(self.states[fetch.slot].tolist())


@pytest.fixture
def sides(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Iterator[Side]]:
    made: list[Side] = []

    def more() -> Iterator[Side]:
        while True:
            made.append(Side(tmp_path, has_states=getattr(request, "param", False)))
            yield made[-1]

    yield more()
    for side in made:
        side.store.close()


def names_of(blocks: list[Block]) -> list[bytes]:
    return [name_of(block.prefix, NAMESPACE) for block in blocks if block.prefix is not None]


def test_freed_prefixes_are_kept_and_fetched_by_another_process(sides: Iterator[Side]) -> None:
    first = next(sides)
    names = names_of(first.computed(3))
    first.store.settle(PATIENCE_S)
    assert first.found(names) == 3
    second = next(sides)
    eventually(lambda: second.found(names), bool)
    blocks, fetch = second.fetched(names)
    eventually(lambda: fetch.is_done, bool)
    assert fetch.num_filled == 3
    assert [second.content(block) for block in blocks] == [{1}, {2}, {3}]


def test_the_blocks_before_one_that_is_offered_are_kept_too(sides: Iterator[Side]) -> None:
    side = next(sides)
    side.pool.on_cached = None
    blocks = side.computed(4)
    names = names_of(blocks)
    prefix = blocks[2].prefix
    assert prefix is not None
    for _ in range(2):  # what is kept is not written again
        side.store.offer(prefix)
        side.store.settle(PATIENCE_S)
        assert side.found(names) == 3
        assert side.store.num_written == 3


def test_the_beginning_of_a_prefix_is_deleted_after_its_end(
    sides: Iterator[Side], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = next(sides)

    def by_use(names: list[bytes]) -> list[bytes]:
        side.store.settle(PATIENCE_S)
        return sorted(names, key=lambda name: next(tmp_path.rglob(name.hex())).stat().st_mtime_ns)

    blocks = side.computed(4)
    names = names_of(blocks)
    assert by_use(names) == names[::-1], "when they are written"
    later = this_minute() + 2
    monkeypatch.setattr("app.kv_tiers.tier_store.this_minute", lambda: later)
    side.fetched(names[:3])
    assert by_use(names) == [names[3], *names[2::-1]], "when they are fetched"
    later += 1
    prefix = blocks[1].prefix
    assert prefix is not None
    side.store.offer(prefix)
    assert by_use(names) == [names[3], names[2], *names[1::-1]], "when one is used that is in the memory"


def test_names_differ_by_salt_and_by_what_comes_before(sides: Iterator[Side]) -> None:
    side = next(sides)
    names = names_of(side.computed(2)) + names_of(side.computed(2, salt="another"))
    assert len(set(names)) == 4


def hand_out_while_copied(side: Side, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Every block gets another owner between the two parts of the next block that is copied; set after that."""
    parts_of, handed_out = side.memory._parts, threading.Event()

    def parts_slowly(block_id: int) -> Iterator[tuple[int, memoryview]]:
        first, second = parts_of(block_id)
        yield first
        for block in side.pool.allocate(side.pool.num_free):
            side.fill(block, 99)
        handed_out.set()
        yield second

    monkeypatch.setattr(side.memory, "_parts", parts_slowly)
    return handed_out


def test_a_block_that_is_handed_out_while_it_is_copied_is_not_written(
    sides: Iterator[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = next(sides)
    handed_out = hand_out_while_copied(side, monkeypatch)
    names = names_of(side.computed(1))
    assert handed_out.wait(PATIENCE_S)
    side.store.settle(PATIENCE_S)
    assert not side.found(names)


def test_a_fetch_ends_at_the_first_block_that_is_not_there(sides: Iterator[Side], tmp_path: Path) -> None:
    side = next(sides)
    names = names_of(side.computed(3))
    side.store.settle(PATIENCE_S)
    next(tmp_path.rglob(names[1].hex())).unlink()
    _, fetch = side.fetched(names)
    eventually(lambda: fetch.is_done, bool)
    assert fetch.num_filled == 1


def test_what_another_process_has_just_written_is_fetched_though_it_is_not_known_yet(
    sides: Iterator[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.kv_tiers.tier_store.RELIST_INTERVAL_S", 3600.0)
    second = next(sides)
    second.store.wait_until_listed(PATIENCE_S)
    first = next(sides)
    names = names_of(first.computed(2))
    first.store.settle(PATIENCE_S)
    assert not second.found(names)
    _, fetch = second.fetched(names)
    eventually(lambda: fetch.is_done, bool)
    assert fetch.num_filled == 2


def test_memory_that_is_given_up_is_neither_read_nor_written(sides: Iterator[Side]) -> None:
    side = next(sides)
    names = names_of(side.computed(1))
    side.store.settle(PATIENCE_S)
    side.memory = None  # type: ignore[assignment]
    _, fetch = side.fetched(names)
    eventually(lambda: fetch.is_done, bool)
    assert fetch.num_filled == 0


def test_a_store_does_not_hold_memory_that_is_given_up(sides: Iterator[Side]) -> None:
    side = next(sides)
    names = names_of(side.computed(1))
    side.store.settle(PATIENCE_S)
    _, fetch = side.fetched(names)
    eventually(lambda: fetch.is_done, bool)
    side.store.settle(PATIENCE_S)
    memory = weakref.ref(side.memory)
    side.memory = None  # type: ignore[assignment]
    eventually(memory, lambda found: found is None)


def test_memory_is_given_up_while_a_fetch_hangs(sides: Iterator[Side], monkeypatch: pytest.MonkeyPatch) -> None:
    side = next(sides)
    names = names_of(side.computed(2))
    side.store.settle(PATIENCE_S)
    is_reading, may_go_on, read = threading.Event(), threading.Event(), side.folder.read

    def read_slowly(*given: Any) -> bool:
        is_reading.set()
        return may_go_on.wait(PATIENCE_S) and read(*given)

    monkeypatch.setattr(side.folder, "read", read_slowly)
    blocks, fetch = side.fetched(names)
    assert is_reading.wait(PATIENCE_S)
    assert not side.store._is_idle()
    fetch.is_wanted = False  # as when the engine gives its memory up
    assert side.store._is_idle(), "nothing waits for the fetch"
    view = weakref.ref(side.memory._tensors[0])
    side.memory.release()
    assert view() is None, "the thread keeps no memory"
    fetch.is_wanted = True
    may_go_on.set()
    eventually(lambda: fetch.is_done, bool)
    assert fetch.num_filled == 0
    assert [side.content(block) for block in blocks] != [{1}, {2}], "it is written nowhere"


def test_a_full_folder_is_left_alone_for_a_while_and_told_once(
    sides: Iterator[Side], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    side, calls = next(sides), count(1)
    write = side.folder.write

    def fail(*given: Any) -> Path:
        next(calls)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(side.folder, "write", fail)
    for tries in (1, 2):
        side.computed(3, salt=str(tries))
        side.store.settle(PATIENCE_S)
        assert next(calls) == 2 * tries, "it is tried once"
        side.store._paused_until = 0.0
    assert caplog.text.count("No space left") == 1
    monkeypatch.setattr(side.folder, "write", write)
    names = names_of(side.computed(2, salt="room"))
    side.store.settle(PATIENCE_S)
    assert side.found(names) == 2


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"path": "a-file"}, "is a file; set a folder"),
        ({"path": "kv", "max_gib": 1e7}, "lower it"),
        ({"path": "kv", "max_gib": 1e-8}, "too small for one block"),
    ],
)
def test_what_no_folder_can_be_is_refused(tmp_path: Path, settings: dict[str, Any], problem: str) -> None:
    (tmp_path / "a-file").touch()
    tier = TierConfig(**settings | {"path": str(tmp_path / settings["path"])})
    with pytest.raises(InvalidSetup, match=problem):
        open_folder(tier, namespace=NAMESPACE, block_bytes=BLOCK_BYTES)


def test_a_folder_that_cannot_be_written_leaves_the_tier_out(caplog: pytest.LogCaptureFixture) -> None:
    assert open_folder(TierConfig(path="/proc/kv"), namespace=NAMESPACE, block_bytes=BLOCK_BYTES) is None
    assert "is not writable" in caplog.text


# ---------------------------------------------------------------------- with a real model


def engine_with(path: Path, tier: Path | None, **settings: Any) -> Engine:
    """With memory for 640 tokens."""
    tiers = [] if tier is None else [{"path": str(tier)}]
    cache = {"num_blocks": 40, "tiers": tiers, **settings}
    return build_sync_engine(config_of(path, cache=cache, dtype="float32"))


def answers(engine: Engine, prompts: list[tuple[int, ...]]) -> tuple[list[list[int]], list[int]]:
    """The tokens of each, some at once, and how many tokens of its prompt were cached."""
    outcome, cached = Outcome(), {}
    requests = [make_request(prompt, max_tokens=12) for prompt in prompts]
    left = list(requests)
    while left or engine.has_work:
        if left and len(engine.running) < 2:
            engine.add(left.pop(0))
        deltas = engine.step()
        outcome.book(deltas)
        cached |= {delta.request_id: delta.num_cached_tokens for delta in deltas}
        store = engine._scheduler.fetches.store
        if store is not None and not engine.running:
            store.settle(PATIENCE_S)
    return [outcome.token_ids[each.request_id] for each in requests], [cached[each.request_id] for each in requests]


def test_answers_are_the_same_with_a_tier_after_evictions_and_restarts(
    demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TierStore, "min_tokens", 100)
    rng = random.Random(3)
    talks = [tuple(rng.randrange(5, 700) for _ in range(300)) for _ in range(4)]
    prompts = [talk[:length] for length in (150, 230, 300) for talk in talks]  # more than fits, in turn
    engine = engine_with(demo_path, None)
    expected, without = answers(engine, prompts)
    engine.close()
    for restart in range(2):
        engine = engine_with(demo_path, tmp_path / "kv")
        store = engine._scheduler.fetches.store
        assert isinstance(store, TierStore)
        store.wait_until_listed(PATIENCE_S)
        given, cached = answers(engine, prompts)
        engine.close()
        assert given == expected
        assert sum(cached) > sum(without)
        assert restart == 0 or cached[0] >= 144, "the first was there before"


# ---------------------------------------------------------------------- with recurrent layers


with_states = pytest.mark.parametrize("sides", [True], indirect=True)


@with_states
def test_a_snapshot_is_kept_beside_its_blocks_and_fetched_by_another_process(sides: Iterator[Side]) -> None:
    first = next(sides)
    blocks = first.computed(4)
    names = names_of(blocks)
    first.snapshots(blocks, 1, 3)
    assert first.found(names) == 3, "the last block has no snapshot behind it"
    assert first.found(names[:2]) == 1
    assert first.store.stats().num_snapshots == (0, 2, 0, 0)
    second = next(sides)
    eventually(lambda: second.found(names), bool)
    blocks, fetch = second.fetched(names[:3])
    eventually(lambda: fetch.is_done, bool)
    assert (fetch.num_filled, fetch.num_usable) == (3, 3)
    assert [second.content(block) for block in blocks] == [{1}, {2}, {3}]
    assert second.state_of(fetch) == {103}


def _cut(path: Path, _other: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _empty(path: Path, _other: Path) -> None:
    path.write_bytes(b"")


def _lengthen(path: Path, _other: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def _flip_a_bit(path: Path, _other: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-STATE_BYTES // 2] ^= 4
    path.write_bytes(content)


def _replace_by_another(path: Path, other: Path) -> None:
    path.write_bytes(other.read_bytes())


@with_states
@pytest.mark.parametrize(
    "damage", [_cut, _empty, _lengthen, _flip_a_bit, _replace_by_another, lambda path, _: path.unlink()]
)
def test_of_a_damaged_snapshot_the_one_before_is_taken(
    sides: Iterator[Side], tmp_path: Path, damage: Callable[[Path, Path], None]
) -> None:
    side = next(sides)
    blocks = side.computed(3)
    names = names_of(blocks)
    side.snapshots(blocks, 1, 3)
    shorter, longer = (next(tmp_path.rglob(name_of_snapshot(name).hex())) for name in (names[0], names[2]))
    damage(longer, shorter)
    _, fetch = side.fetched(names)
    eventually(lambda: fetch.is_done, bool)
    assert (fetch.num_filled, fetch.num_usable) == (3, 1)
    assert side.state_of(fetch) == {101}
    assert not longer.exists(), "it is not read again"


@with_states
def test_a_snapshot_without_a_block_before_it_is_not_taken(sides: Iterator[Side], tmp_path: Path) -> None:
    side = next(sides)
    blocks = side.computed(3)
    names = names_of(blocks)
    side.snapshots(blocks, 1, 3)
    next(tmp_path.rglob(names[1].hex())).unlink()
    _, fetch = side.fetched(names)
    eventually(lambda: fetch.is_done, bool)
    assert (fetch.num_filled, fetch.num_usable) == (1, 1)
    next(tmp_path.rglob(names[0].hex())).unlink()
    _, fetch = side.fetched(names)
    eventually(lambda: fetch.is_done, bool)
    assert (fetch.num_filled, fetch.num_usable) == (0, 0)


@with_states
def test_a_slot_that_is_handed_out_while_it_is_copied_is_not_written(
    sides: Iterator[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = next(sides)
    memory, states = side.memory.states, side.pool.states
    assert memory is not None
    assert states is not None
    blocks = side.computed(1)
    parts_of = memory._parts

    def parts_slowly(slot: int) -> Iterator[tuple[int, memoryview]]:
        yield from parts_of(slot)
        prefix = blocks[0].prefix
        assert prefix is not None
        states.forget(prefix)
        states.take_back(slot, prefix, SIZE)  # the same prefix has a snapshot in the same slot again

    monkeypatch.setattr(memory, "_parts", parts_slowly)
    side.snapshots(blocks, 1)
    assert side.store.num_snapshots_written == side.store.num_written == 0
    assert not side.found(names_of(blocks))


@with_states
def test_a_slot_that_is_handed_out_while_blocks_are_written_is_kept_before(
    sides: Iterator[Side], monkeypatch: pytest.MonkeyPatch
) -> None:
    side, blocks, write = next(sides), [], BlockFolder.write

    def write_slowly(folder: BlockFolder, *given: Any) -> None:
        for block in blocks:
            if block.prefix is not None and side.pool.states is not None:
                side.pool.states.forget(block.prefix)
        side.states[:] = 99
        write(folder, *given)

    monkeypatch.setattr(BlockFolder, "write", write_slowly)
    blocks += side.computed(3)
    side.snapshots(blocks, 3)
    assert side.found(names_of(blocks)) == 3
    _, fetch = side.fetched(names_of(blocks))
    eventually(lambda: fetch.is_done, bool)
    assert side.state_of(fetch) == {103}


@pytest.fixture(params=["qwen3_5_text", "granitemoehybrid"])
def hybrid_path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return save_random_model(tmp_path / "model", request.param, max_position_embeddings=512, **HYBRIDS[request.param])


@pytest.fixture
def _fetches_whatever_it_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model computes as quickly as it fetches."""
    monkeypatch.setattr(TierStore, "min_tokens", 100)
    monkeypatch.setattr(TierStore, "expected_s", lambda *given: 0.0)
    monkeypatch.setattr("app.engine.fetches.MIN_PATIENCE_S", PATIENCE_S)


def talks_of(number: int, *lengths: int) -> list[tuple[int, ...]]:
    """Beginnings of as many talks, in turn."""
    rng = random.Random(4)
    talks = [tuple(rng.randrange(5, VOCAB_SIZE) for _ in range(max(lengths))) for _ in range(number)]
    return [talk[:length] for length in lengths for talk in talks]


def answers_in_turn(engine: Engine, prompts: list[tuple[int, ...]]) -> list[tuple[list[int], int]]:
    """The tokens of each and how many tokens of its prompt were cached; what is offered is kept before the next."""
    store = engine._scheduler.fetches.store
    if isinstance(store, TierStore):
        store.wait_until_listed(PATIENCE_S)
    given = []
    for prompt in prompts:
        [token_ids], [num_cached] = answers(engine, [prompt])
        given.append((token_ids, num_cached))
    engine.close()
    return given


@pytest.mark.usefixtures("_fetches_whatever_it_takes")
def test_a_prefix_with_states_is_resumed_after_evictions_and_restarts(
    hybrid_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.model.kv_cache.num_state_slots", lambda *_, **__: 5)
    prompts = talks_of(2, 150, 230)  # more than fits, in turn
    computed = answers_in_turn(engine_with(hybrid_path, None), prompts)
    assert [num_cached for _, num_cached in computed] == [0] * 4
    for expected_cached in ([0, 0, 144, 144], [144, 144, 224, 224]):
        engine = engine_with(hybrid_path, tmp_path / "kv")
        given = answers_in_turn(engine, prompts)
        assert given == [(token_ids, num) for (token_ids, _), num in zip(computed, expected_cached, strict=True)]
