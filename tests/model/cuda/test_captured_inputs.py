"""Sizes and padding of captured steps: pure functions, without tensors."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import Pooling
from app.model.cuda.captured_inputs import (
    StepSize,
    coarse_sizes,
    decode_size,
    graph_sizes,
    mixed_sizes,
    padded_columns,
    smallest_fitting,
)
from app.model.inputs import packed_columns
from tests.kit.models import scheduled

DECODE = tuple(map(decode_size, graph_sizes(256)))
MIXED = mixed_sizes(max_rows=256, max_tokens=8192)


def item(num_tokens: int, *, start: int = 0, samples: bool = True, **model_info: object) -> ScheduledSequence:
    block_ids = list(range(10, 10 - (-(start + num_tokens) // 4)))
    return scheduled(range(1, num_tokens + 1), start, block_ids, samples=samples, model_info=model_info)


def chosen(*items: ScheduledSequence, **model_info: bool) -> StepSize | None:
    return smallest_fitting(StepBatch(items, (), **model_info), decode=DECODE, mixed=MIXED)


def test_sizes_that_every_replica_needs_are_captured_first() -> None:
    assert coarse_sizes(graph_sizes(256)) == (256, 128, 64, 32, 16, 8, 4, 2, 1)
    assert coarse_sizes(graph_sizes(100)) == (100, 64, 32, 16, 8, 4, 2, 1)
    assert coarse_sizes(graph_sizes(1)) == (1,)


@pytest.mark.parametrize(
    ("max_rows", "sizes"), [(1, (1,)), (3, (1, 2, 3)), (8, (1, 2, 4, 8)), (20, (1, 2, 4, 8, 16, 20))]
)
def test_the_largest_size_is_what_may_run(max_rows: int, sizes: tuple[int, ...]) -> None:
    assert graph_sizes(max_rows) == sizes


def test_spare_rows_are_few_and_so_are_graphs() -> None:
    sizes = graph_sizes(4096)
    assert sizes[-1] == 512
    assert len(sizes) < 50
    assert all(after - before <= max(8, before / 4) for before, after in pairwise(sizes))


def test_steps_with_prompts_have_few_sizes_and_few_spare_tokens() -> None:
    tokens = [size.num_tokens for size in MIXED]
    assert tokens == [64, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 1280, 1536, 1792, 2048]
    assert all(after - before <= max(64, before / 4) for before, after in pairwise(tokens))


@pytest.mark.parametrize(
    ("max_tokens", "tokens"),
    [(0, []), (1, []), (2, [2]), (64, [64]), (100, [64, 100]), (300, [64, 128, 192, 256, 300])],
)  # fmt: skip
def test_the_largest_step_with_prompts_is_what_may_run(max_tokens: int, tokens: list[int]) -> None:
    assert [size.num_tokens for size in mixed_sizes(max_rows=16, max_tokens=max_tokens)] == tokens


def test_a_step_is_padded_to_the_smallest_size_that_holds_it() -> None:
    assert chosen(item(1), item(1, start=7)) == decode_size(2)
    assert chosen(*[item(1)] * 9) == decode_size(16)
    assert chosen(item(1, samples=False)) == MIXED[0]  # a prompt's piece of one token has no logits
    assert chosen(item(63), item(1)) == MIXED[0]
    assert chosen(item(64), item(1)) == MIXED[1]
    assert chosen(*[item(2)] * 33) == MIXED[1]  # 66 tokens
    assert chosen(item(2047), item(1)) == MIXED[-1]


def test_a_step_that_no_size_holds_runs_eagerly() -> None:
    assert chosen(item(2048), item(1)) is None
    assert chosen(*[item(1)] * 257) is None
    assert chosen(*[item(2)] * 65) is None, "more prompts than a captured step has room for"
    assert smallest_fitting(StepBatch((item(2),), ()), decode=DECODE, mixed=()) is None


def test_behind_each_draft_there_is_room_for_logits() -> None:
    few = mixed_sizes(max_rows=8, max_tokens=512)
    for num_drafts, size in ((4, few[0]), (5, None)):
        batch = StepBatch((item(1 + num_drafts), *[item(1)] * 3), (), has_drafts=True)
        assert smallest_fitting(batch, decode=DECODE, mixed=few) == size
    assert chosen(*[item(2)] * 33, has_drafts=True) == MIXED[1]


def test_scored_prompts_and_embeddings_run_eagerly() -> None:
    assert chosen(item(5, targets=(6, 7), first_target=1), has_logprobs=True) is None
    assert chosen(item(5, samples=False, pooling=Pooling.MEAN), has_pooling=True) is None
    assert chosen(item(5), has_logprobs=True) == MIXED[0]  # of the tokens that are drawn


def test_spare_columns_of_a_decode_step_belong_to_no_sequence() -> None:
    packed = packed_columns(StepBatch((item(1, start=5), item(1)), ()), block_size=4)
    single = [(0, 1, 5, 2), (1, 1, 0, 0)]
    token_ids, positions, _, slots, columns = padded_columns(
        packed, [single], size=decode_size(4), scratch_slot=32, scratch_row=6
    )
    assert token_ids == [1, 1, 0, 0]
    assert positions == [5, 0, 0, 0]
    assert slots == [11 * 4 + 1, 10 * 4, 32, 32]
    assert columns == [*(0, 1, 2, 3), *(1, 1, 1, 1), *(5, 0, 0, 0), *(2, 0, 6, 6)]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 30), st.booleans()), min_size=1, max_size=7))
def test_every_part_of_a_mixed_step_is_filled_and_spare_parts_touch_nothing(
    places: list[tuple[int, int, bool]],
) -> None:
    items = [item(num_tokens, start=start, samples=samples) for num_tokens, start, samples in places]
    size = StepSize(64, 8, 8)
    packed = packed_columns(StepBatch(tuple(items), ()), block_size=4)
    num_tokens, num_sampled = len(packed.token_ids), sum(samples for *_, samples in places)
    single = [(index, 1, start, row) for row, (index, start) in enumerate([(0, 3), (4, 9)])]
    token_ids, positions, logits, slots, columns = padded_columns(
        packed, [single], size=size, scratch_slot=999, scratch_row=77
    )
    assert [len(each) for each in (token_ids, positions, slots, logits, columns)] == [64, 64, 64, 8, 32]
    assert token_ids[num_tokens:] == [0] * (64 - num_tokens)
    assert slots[:num_tokens] == packed.slots[0]
    assert set(slots[num_tokens:]) == {999}
    assert logits[:num_sampled] == packed.logits_indices
    assert all(0 <= place < 64 for place in logits)
    first, tokens, position, row = (columns[at : at + 8] for at in range(0, 32, 8))
    assert (first[:2], tokens[:2], position[:2], row[:2]) == ([0, 4], [1, 1], [3, 9], [0, 1])
    assert (set(tokens[2:]), set(position[2:]), set(row[2:])) == ({0}, {-1}, {77})
