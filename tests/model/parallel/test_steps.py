from __future__ import annotations

import random

from msgspec import structs

from app.engine.batch import ScheduledSequence, StepBatch
from app.model.adapters import SlottedAdapter
from app.model.parallel.steps import StepReader, StepWriter
from tests.kit.models import scheduled


def item(
    block_ids: list[int], *token_ids: int, start: int = 0, samples: bool = True, targets: tuple[int, ...] = ()
) -> ScheduledSequence:
    model_info = {"targets": targets, "first_target": start + 1 if targets else 0}
    return scheduled(token_ids, start, block_ids, samples=samples, model_info=model_info, temperature=0.7, logprobs=2)


def facts_of(batch: StepBatch) -> list[tuple[object, ...]]:
    """What a forward pass needs."""
    return [
        (each.token_ids, each.start, each.block_ids, each.samples, len(each.targets), each.first_target, each.adapter)
        for each in batch.scheduled
    ] + [(batch.has_logprobs, batch.has_targets, batch.has_drafts, batch.has_adapters)]


def sent(writer: StepWriter, reader: StepReader, *items: ScheduledSequence, **has: bool) -> int:
    """Send a step and compare what arrives; returns its bytes."""
    batch = StepBatch(items, (), **has)
    message = writer.message(batch)
    assert facts_of(reader.batch(message)) == facts_of(batch)
    return len(message)


def test_a_step_arrives_with_all_that_a_forward_pass_needs() -> None:
    writer, reader = StepWriter(), StepReader()
    sent(writer, reader, item([4, 2], 11, 12, 13, samples=False), item([9], -1, start=7))
    sent(writer, reader, item([1, 2], 5, 6, 7, targets=(6, 7)), has_logprobs=True)
    sent(writer, reader, item([4, 2], 11, 12, 13, start=5), item([9], 7, start=3), has_drafts=True)


def test_all_sequences_of_a_slot_have_one_adapter() -> None:
    writer, reader = StepWriter(), StepReader()
    adapters = [SlottedAdapter(slot) for slot in (3, 3, 0)]
    decoding = [structs.replace(item([n], n, start=4), adapter=adapter) for n, adapter in enumerate(adapters)]
    prompt = structs.replace(item([8], 1, 2, samples=False), adapter=adapters[0])
    sent(writer, reader, *decoding, item([9], 5, start=2))
    sent(writer, reader, *decoding[:2], prompt)
    arrived = [each.adapter for each in reader.batch(writer.message(StepBatch((*decoding, prompt), ()))).scheduled]
    assert len({id(each) for each in arrived}) == 2


def test_only_new_block_ids_are_sent() -> None:
    writer, reader = StepWriter(), StepReader()
    blocks = list(range(1000))
    first = sent(writer, reader, item(blocks, 1, start=15_999))
    blocks.append(1000)
    later = sent(writer, reader, item(blocks, 1, start=16_000))
    assert first > 4000
    assert later < 60


def test_sequences_of_long_ago_are_forgotten_on_both_sides_and_may_come_back() -> None:
    writer, reader = StepWriter(), StepReader()
    lists = [[n, n + 1] for n in range(2000)]
    for blocks in lists:
        sent(writer, reader, item(blocks, 1))
    assert len(writer._tables) == len(reader._tables) < 400
    sent(writer, reader, item(lists[0], 2, start=1))


def test_random_steps_arrive() -> None:
    rng = random.Random(1)
    writer, reader = StepWriter(), StepReader()
    lists = [[rng.randrange(1000)] for _ in range(400)]
    for _ in range(200):
        for _ in range(20):
            lists[rng.randrange(400)].append(rng.randrange(1000))
        lists[rng.randrange(400)] = [rng.randrange(1000)]
        items = [item(blocks, *range(rng.randrange(1, 4)), start=rng.randrange(99)) for blocks in rng.sample(lists, 30)]
        sent(writer, reader, *items)
