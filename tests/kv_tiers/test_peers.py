"""Blocks that come from another replica's memory: the same bytes, or none."""

from __future__ import annotations

import errno
import random
import socket
import threading
from array import array
from collections.abc import Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from app.build import build_sync_engine
from app.config import ReplicasConfig
from app.engine.engine import Engine
from app.engine.prefix import Prefix, label_of_snapshot
from app.engine.request import Address, PrefixSource
from app.kv_tiers.folder import header_of
from app.kv_tiers.peers import MAX_REQUEST_BYTES, MAX_SENT_AT_ONCE, BlocksOfPeer, BlocksRequest, Buffers, PeerServer
from app.kv_tiers.tier_store import TierStore
from tests.kit.engine import Outcome, make_request
from tests.kit.models import config_of
from tests.kv_tiers.test_tier_store import NAMESPACE, SIZE, STATE_BYTES, Side, hand_out_while_copied
from tests.waiting import PATIENCE_S, eventually

LENGTHS = (3, 8, 5)


@pytest.fixture
def side(tmp_path: Path) -> Iterator[Side]:
    """A replica that has a prefix of three blocks."""
    made = Side(tmp_path)
    made.computed(3, salt="salt")
    yield made
    made.store.close()


def address_of(side: Side) -> Address:
    address = side.store.serve("127.0.0.1", side.pool.find)
    assert address is not None
    return address


def wanted(num_blocks: int, *, num_before: int = 0, salt: str = "salt", namespace: bytes = NAMESPACE) -> BlocksRequest:
    token_ids = array("q", [place for place in range(num_blocks) for _ in range(SIZE)])
    return BlocksRequest(namespace, salt, token_ids.tobytes(), num_before)


def received(address: Address, question: BlocksRequest, *, num_bytes: int = 64) -> list[int]:
    """The values that fill each block that comes."""
    values: list[int] = []
    with closing(BlocksOfPeer(address, question)) as blocks:
        content = memoryview(bytearray(num_bytes))
        place = question.num_before
        while blocks.read((place,) * SIZE, content):
            (value,) = set(content)
            values.append(value)
            place += 1
    return values


def test_the_blocks_of_a_prefix_come_as_far_as_they_are_there(side: Side) -> None:
    address = address_of(side)
    assert received(address, wanted(2)) == [1, 2]
    assert received(address, wanted(3, num_before=1)) == [2, 3]
    assert received(address, wanted(5)) == [1, 2, 3]
    assert side.store.stats().num_sent == 7
    assert address_of(side) == address, "it is served once"


@pytest.mark.parametrize("question", [wanted(3, salt="another"), wanted(3, namespace=b"another"), wanted(0)])
def test_nothing_comes_for_another_salt_or_model(side: Side, question: BlocksRequest) -> None:
    assert received(address_of(side), question) == []


def test_nothing_comes_without_the_secret(side: Side) -> None:
    address = address_of(side)
    assert received(address._replace(secret="0" * len(address.secret)), wanted(3)) == []
    assert received(address._replace(secret="short"), wanted(3)) == []


def test_a_block_that_is_handed_out_while_it_is_copied_is_not_sent(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    address = address_of(side)
    hand_out_while_copied(side, monkeypatch)
    assert received(address, wanted(3)) == []


def test_memory_that_is_given_up_is_not_sent(side: Side) -> None:
    address = address_of(side)
    side.memory = None  # type: ignore[assignment]
    assert received(address, wanted(3)) == []


@pytest.mark.parametrize(
    "after_secret",
    [
        b"",
        b"\0\0",
        (MAX_REQUEST_BYTES + 1).to_bytes(4, "big"),
        (5).to_bytes(4, "big") + b"\xc1\xc1\xc1\xc1\xc1",
        (3).to_bytes(4, "big") + b"\x91\xc0\xc0",
    ],
)
def test_what_is_no_question_is_hung_up_on_and_others_are_answered(side: Side, after_secret: bytes) -> None:
    address = address_of(side)
    for _ in range(MAX_SENT_AT_ONCE + 1):
        with socket.create_connection(address[:2], timeout=PATIENCE_S) as connection:
            connection.sendall(address.secret.encode() + after_secret)
            connection.shutdown(socket.SHUT_WR)
            assert connection.recv(1) == b""
    assert received(address, wanted(3)) == [1, 2, 3]


def test_a_connection_that_cannot_be_taken_is_told_once_and_later_ones_are_taken(
    side: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("app.kv_tiers.peers.ACCEPT_PAUSE_S", 0.0)
    accept, failures = socket.socket.accept, iter(range(3))

    def fail_at_first(listening: socket.socket) -> tuple[socket.socket, object]:
        if next(failures, None) is not None:
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listening)

    monkeypatch.setattr(socket.socket, "accept", fail_at_first)
    assert received(address_of(side), wanted(3)) == [1, 2, 3]
    assert caplog.text.count("Too many open files") == 1


def test_only_so_many_are_answered_at_once(side: Side) -> None:
    address, is_asked, may_go_on = address_of(side), threading.Semaphore(0), threading.Event()

    def find_slowly(token_ids: Sequence[int], salt: str) -> Sequence[Prefix]:
        is_asked.release()
        may_go_on.wait(PATIENCE_S)
        return side.pool.find(token_ids, salt)

    assert side.store._peers is not None
    side.store._peers._find = find_slowly
    asking = [BlocksOfPeer(address, wanted(3)) for _ in range(MAX_SENT_AT_ONCE)]
    for _ in asking:
        assert is_asked.acquire(timeout=PATIENCE_S)
    assert received(address, wanted(3)) == []
    may_go_on.set()
    content = memoryview(bytearray(64))
    assert all(blocks.read((0,) * SIZE, content) for blocks in asking)
    for blocks in asking:
        blocks.close()


@pytest.mark.parametrize("seed", range(8))
def test_a_block_that_is_damaged_on_its_way_is_not_taken(seed: int) -> None:
    """A server that sends what it was given, with a bit flipped, and closes after a part of it."""
    rng = random.Random(seed)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = Address("127.0.0.1", listening.getsockname()[1], "0" * 32)
        content = memoryview(bytearray(rng.randbytes(64)))
        sent = bytearray(header_of((0,) * SIZE, content) + content)
        if seed % 2:
            sent[rng.randrange(len(sent))] ^= 1 << rng.randrange(8)
        else:
            del sent[rng.randrange(len(sent)) :]

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(sent)

        thread = threading.Thread(target=answer)
        thread.start()
        assert received(address, wanted(1)) == []
        thread.join()


# ---------------------------------------------------------------------- with recurrent layers


@pytest.fixture
def side_with_states(tmp_path: Path) -> Iterator[Side]:
    """A replica that has a prefix of five blocks, with snapshots behind two and four."""
    made = Side(tmp_path / "first", has_states=True)
    made.snapshots(made.computed(5, salt="salt"), 2, 4)
    yield made
    made.store.close()


def received_behind_snapshot(address: Address, question: BlocksRequest) -> tuple[int, set[int], int]:
    """Tokens before the snapshot, the values in the snapshot, and how many blocks come behind it."""
    buffers = Buffers(memoryview(bytearray(64)), memoryview(bytearray(STATE_BYTES)))
    with closing(BlocksOfPeer(address, question)) as blocks:
        num_tokens = blocks.read_snapshot(SIZE, buffers.snapshot)
        places = range(question.num_before, 99)
        num_blocks = next(at for at, place in enumerate(places) if not blocks.read((place,) * SIZE, buffers.block))
        return num_tokens, set(buffers.snapshot), num_blocks


def test_the_longest_snapshot_comes_before_its_blocks(side_with_states: Side) -> None:
    address = address_of(side_with_states)
    assert received_behind_snapshot(address, wanted(5)) == (4 * SIZE, {104}, 4)
    assert received_behind_snapshot(address, wanted(3, num_before=1)) == (2 * SIZE, {102}, 1)
    assert received_behind_snapshot(address, wanted(1)) == (0, {0}, 0)
    assert received_behind_snapshot(address, wanted(5, num_before=4)) == (0, {0}, 0)
    assert side_with_states.store.stats().num_snapshots == (0, 2, 0, 2)


def test_a_snapshot_is_received_with_its_blocks(side_with_states: Side, tmp_path: Path) -> None:
    side_with_states.snapshots(side_with_states.computed(3), 2)
    request = replace(make_request((0, 0, 1, 1, 2, 2, 3)), prefix_at=PrefixSource(address_of(side_with_states), 3))
    names = [bytes([number]) for number in range(3)]
    for is_there in (True, False):
        side = Side(tmp_path / "second", has_states=True)
        assert side.store.lookup(iter(names), request, num_before=0) == 3
        _, fetch = side.fetched(names, request)
        eventually(lambda fetch=fetch: fetch.is_done, bool)  # type: ignore[misc]
        assert fetch.num_usable == 2 * is_there
        assert not is_there or side.state_of(fetch) == {102}
        assert side.store.stats().num_snapshots == (0, 0, int(is_there), 0)
        side.store.close()
        side_with_states.store.close()


@pytest.mark.parametrize("seed", range(12))
def test_a_snapshot_that_is_damaged_on_its_way_is_not_taken(seed: int) -> None:
    rng = random.Random(seed)
    content = memoryview(bytearray(rng.randbytes(STATE_BYTES)))
    label = label_of_snapshot((3 if seed % 3 else 2) * SIZE, (1,) * SIZE)
    sent = bytearray(header_of(label, content) + content)
    if seed % 3 == 1:
        sent[rng.randrange(len(sent))] ^= 1 << rng.randrange(8)
    elif seed % 3 == 0:
        del sent[rng.randrange(len(sent)) :]
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = Address("127.0.0.1", listening.getsockname()[1], "0" * 32)

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.sendall(sent)

        thread = threading.Thread(target=answer)
        thread.start()
        with closing(BlocksOfPeer(address, wanted(3))) as blocks:
            assert blocks.read_snapshot(SIZE, memoryview(bytearray(STATE_BYTES))) == 0
        thread.join()


# ----------------------------------------------------------------------


def test_a_server_that_is_closed_takes_no_more(side: Side) -> None:
    address = address_of(side)
    side.store.close()
    with pytest.raises(OSError, match="refused"):
        BlocksOfPeer(address, wanted(3))


def test_a_question_of_a_later_version_is_understood() -> None:
    later = msgspec.msgpack.encode((NAMESPACE, "salt", b"", 1, "new"))
    assert msgspec.msgpack.decode(later, type=BlocksRequest) == BlocksRequest(NAMESPACE, "salt", b"", 1)


def test_a_host_that_is_not_ours_is_an_error(side: Side) -> None:
    with pytest.raises(OSError, match="assign"):
        PeerServer("192.0.2.1", namespace=NAMESPACE, new_buffers=Buffers, find=side.pool.find, copies=nullcontext)


# ---------------------------------------------------------------------- with a real model


def engine_of(path: Path, tier: Path | None = None) -> tuple[Engine, Address]:
    """One of two replicas, and where it gives its prefixes."""
    tiers = [] if tier is None else [{"path": str(tier)}]
    config = config_of(path, cache={"num_blocks": 80, "tiers": tiers}, dtype="float32")
    engine = build_sync_engine(config, ReplicasConfig(num_replicas=2))
    address = engine.serve_prefixes("127.0.0.1")
    assert address is not None
    return engine, address


def answered(engine: Engine, prompt: tuple[int, ...], prefix_at: PrefixSource | None = None) -> tuple[list[int], int]:
    """The tokens, and how many tokens of the prompt were fetched or cached."""
    request = replace(make_request(prompt, max_tokens=12), prefix_at=prefix_at)
    outcome, num_cached = Outcome(), 0
    engine.add(request)
    while engine.has_work:
        deltas = engine.step()
        outcome.book(deltas)
        num_cached = max([num_cached, *(delta.num_cached_tokens for delta in deltas)])
    return outcome.token_ids[request.request_id], num_cached


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_replica_goes_on_with_the_prefix_of_another(
    demo_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, has_folder: bool
) -> None:
    monkeypatch.setattr("app.engine.fetches.MIN_PATIENCE_S", PATIENCE_S)  # on a busy machine computing may be quicker
    rng = random.Random(5)
    prompt = tuple(rng.randrange(5, 700) for _ in range(400))
    first, address = engine_of(demo_path)
    second, _ = engine_of(demo_path, tmp_path / "kv" if has_folder else None)
    expected, _ = answered(first, prompt)
    assert answered(second, prompt[:100])[1] == 0
    assert answered(second, prompt, PrefixSource(address, 25)) == (expected, 384)
    store = second._scheduler.fetches.store
    assert isinstance(store, TierStore)
    assert store.stats().num_received == 24 - 6, "it has those before, and one token is computed"
    first.close()
    prompt = (*prompt[:40], *prompt)
    expected, _ = answered(second, prompt)
    third, _ = engine_of(demo_path)
    assert answered(third, prompt, PrefixSource(address, 25)) == (expected, 0), "it has ended"
    assert third._scheduler.fetches.store is not None
    ask_again = replace(make_request(prompt), prefix_at=PrefixSource(address, 25))
    assert third._scheduler.fetches.store.lookup(iter([b"name"]), ask_again, num_before=0) == 0, "it is left alone"
    second.close()
    third.close()


def test_what_was_slow_once_is_tried_again(side: Side, monkeypatch: pytest.MonkeyPatch) -> None:
    request = make_request()
    side.store._measure(None, 10.0)
    assert side.store.expected_s(3, request) == 30.0
    monkeypatch.setattr("app.kv_tiers.tier_store.MEASUREMENT_TTL_S", -1.0)
    assert side.store.expected_s(3, request) == 0.0
    side.store._measure(None, 1.0)
    monkeypatch.undo()
    assert side.store.expected_s(3, request) == 3.0
    eventually(lambda: side.store._is_idle())


def test_a_slow_replica_makes_neither_the_folder_nor_another_replica_slow(side: Side) -> None:
    def expected_s(at: PrefixSource | None) -> float:
        return side.store.expected_s(3, replace(make_request(), prefix_at=at))

    slow, other = (PrefixSource(Address("127.0.0.1", port, "secret"), 3) for port in (1, 2))
    side.store._measure(None, 0.5)
    side.store._measure(slow.address, 100.0)
    assert (expected_s(None), expected_s(slow), expected_s(other)) == (1.5, 300.0, 0.0)
