"""What a replica says of its cached prefixes."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from typing import NamedTuple

import pytest

from app.engine.prefix import digests_of
from app.fleet.dispatch import PrefixIndex, is_indexed
from app.fleet.prefix_feed import PrefixFeed, PrefixReader
from tests.kit.engine import CountingRunner, build_fake_engine, make_request

BLOCK_SIZE = 2


class Noted(NamedTuple):
    """As much of a prefix as is told."""

    digest: int
    num_blocks: int = 1


class Ingress:
    """An index that a feed fills, when it is asked to."""

    def __init__(self, feed: PrefixFeed) -> None:
        self.reader: PrefixReader = feed.open()
        self.index = PrefixIndex(block_size=BLOCK_SIZE)

    def read(self) -> None:
        changes = self.reader.take()
        if changes is not None:
            self.index.note("a", changes)

    def matched(self, token_ids: tuple[int, ...]) -> int:
        return self.index.match(digests_of(token_ids, salt="", block_size=BLOCK_SIZE)).get("a", 0)


@pytest.mark.parametrize("seed", range(20))
def test_every_ingress_knows_what_the_engine_has_however_seldom_it_reads(seed: int) -> None:
    rng, feed = random.Random(seed), PrefixFeed()
    engine = build_fake_engine(
        runner=CountingRunner(block_size=BLOCK_SIZE), block_size=BLOCK_SIZE, num_blocks=14, max_running=3
    )
    engine.on_prefixes(feed.note)
    ingresses = [Ingress(feed)]
    talks = [tuple(rng.randrange(5, 40) for _ in range(12)) for _ in range(4)]
    for _ in range(120):
        match rng.randrange(8):
            case 0 | 1:
                engine.add(make_request(rng.choice(talks)[: rng.randrange(1, 12)], max_tokens=rng.randrange(1, 4)))
            case 2:
                rng.choice(ingresses).read()
            case 3 if rng.random() < 0.2:
                ingresses.append(Ingress(feed))  # it restarts, or its connection does
            case 4 if rng.random() < 0.2:
                engine.clear_prefix_cache()
            case _:
                engine.step()
    while engine.has_work:
        engine.step()
    for each in ingresses:
        each.read()
    for talk in talks:
        asked = (*talk, 1)  # the last token is never matched
        num_blocks = len(engine._scheduler.pool.match(asked, salt=""))
        found = max(each for each in range(num_blocks + 1) if is_indexed(each)) * BLOCK_SIZE
        assert {each.matched(talk) for each in ingresses} == {found}


def test_a_reader_that_does_not_read_costs_no_more_than_what_there_is_and_gets_it_all() -> None:
    feed = PrefixFeed()
    reader, closed = feed.open(), feed.open()
    assert reader.take() is not None
    closed.close()
    for number in range(10_000):
        feed.note(Noted(number), True)
        feed.note(Noted(number), False)
    feed.note(Noted(-7), True)
    assert len(reader.changed) < 2_000
    assert not closed.changed
    changes = reader.take()
    assert changes is not None
    assert changes.is_all
    assert changes.held == (-7).to_bytes(8, "little", signed=True)
    assert reader.take() is None


def test_of_long_prefixes_some_are_told() -> None:
    feed = PrefixFeed()
    for num_blocks in range(1, 13):
        feed.note(Noted(num_blocks, num_blocks), True)
    assert sorted(feed.held) == [1, 2, 3, 4, 8, 12]


def test_digests_are_the_same_in_every_process() -> None:
    code = "from app.engine.prefix import digests_of; print(digests_of([1, 2, 3, 4], salt='salt', block_size=2)[1])"
    for seed in "12":
        environment = os.environ | {"PYTHONHASHSEED": seed}
        printed = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, check=True).stdout
        assert int(printed) == digests_of([1, 2, 3, 4], salt="salt", block_size=2)[1]
