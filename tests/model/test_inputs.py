import torch

from app.engine.batch import StepBatch
from app.model.inputs import build_attention_rows, build_inputs, build_segments
from tests.kit.models import scheduled


def test_tokens_of_all_sequences_are_packed_into_one_row() -> None:
    batch = StepBatch(
        (
            scheduled((11, 12, 13), 2, [4, 7], samples=False),
            scheduled((21,), 8, [1, 3, 5, 9]),
            scheduled((31, 32), 0, [2]),
        ),
        (),
    )
    inputs = build_inputs(batch, block_size=4, device=torch.device("cpu"))
    assert inputs.token_ids.tolist() == [[11, 12, 13, 21, 31, 32]]
    assert inputs.positions.tolist() == [[2, 3, 4, 8, 0, 1]]
    assert inputs.slots[0].tolist() == [18, 19, 28, 20, 8, 9]
    assert inputs.logits_indices.tolist() == [3, 5]
    rows = build_attention_rows(batch, group=0, block_size=4, device=torch.device("cpu"))
    assert rows.decode is not None
    assert rows.decode.token_indices.tolist() == [3]
    assert rows.decode.block_tables.tolist() == [[1, 3, 5]]  # the fourth block is not reached yet
    assert rows.decode.lengths.tolist() == [9]
    first, second = rows.prefill
    assert (first.tokens, first.block_table.tolist(), first.start, first.length) == (slice(0, 3), [4, 7], 2, 5)
    assert (second.tokens, second.block_table.tolist(), second.start, second.length) == (slice(4, 6), [2], 0, 2)


def test_shorter_block_tables_are_padded() -> None:
    batch = StepBatch((scheduled((1,), 0, [6]), scheduled((2,), 5, [8, 9])), ())
    rows = build_attention_rows(batch, group=0, block_size=4, device=torch.device("cpu"))
    assert rows.decode is not None
    assert rows.decode.block_tables.tolist() == [[6, 0], [8, 9]]
    assert rows.prefill == ()


def test_long_sequences_are_cut_into_segments() -> None:
    batch = StepBatch((scheduled(tuple(range(5)), 2, [4, 7, 9]), scheduled((1,), 5, [8, 6])), ())
    segments = build_segments(batch, block_size=4, max_tokens=2)
    assert segments.segments.tolist() == [[0, 2, 2, 0], [2, 2, 4, 0], [4, 1, 6, 0], [5, 1, 5, 2]]
    assert segments.tables[0].tolist() == [4, 7, 8, 6]  # the third block is not reached yet


def test_a_step_in_which_all_decode_is_packed_as_any_other() -> None:
    decoding = [scheduled((21,), 8, [1, 3, 5, 9]), scheduled((22,), 3, [2], samples=False), scheduled((23,), 4, [6, 8])]
    alone = build_inputs(StepBatch(tuple(decoding), ()), block_size=4, device=torch.device("cpu"))
    beside = StepBatch((*decoding, scheduled((31, 32), 0, [7])), ())
    whole = build_inputs(beside, block_size=4, device=torch.device("cpu"))
    assert alone.token_ids.tolist() == [whole.token_ids[0, :3].tolist()] == [[21, 22, 23]]
    assert alone.positions.tolist() == [whole.positions[0, :3].tolist()] == [[8, 3, 4]]
    assert alone.slots[0].tolist() == whole.slots[0][:3].tolist() == [20, 11, 32]
    assert alone.logits_indices.tolist() == [0, 2]
    assert whole.logits_indices.tolist() == [0, 2, 4]
