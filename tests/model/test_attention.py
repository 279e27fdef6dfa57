from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.batch import Batch, ScheduledSequence
from app.engine.request import SamplingParams
from app.model.attention import AttentionRules, PagedStep
from app.model.inputs import build_inputs
from app.model.kv_cache import KVCache, LayerShape

BLOCK_SIZE, NUM_BLOCKS, NUM_HEADS, NUM_KV_HEADS, DIM = 4, 24, 4, 2, 8


def new_cache() -> KVCache:
    layer = LayerShape(num_kv_heads=NUM_KV_HEADS, key_dim=DIM, value_dim=DIM)
    return KVCache(
        {0: layer}, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=torch.device("cpu")
    )


def scheduled(start: int, num_tokens: int, block_ids: list[int]) -> ScheduledSequence:
    return ScheduledSequence(
        request_id="r", token_ids=(0,) * num_tokens, start=start, block_ids=block_ids, samples=True,
        sampling=SamplingParams(max_tokens=1),
    )  # fmt: skip


def attend(
    cache: KVCache, items: list[ScheduledSequence], qkv: list[torch.Tensor], rules: AttentionRules
) -> torch.Tensor:
    inputs = build_inputs(Batch(tuple(items), ()), block_size=BLOCK_SIZE, device=torch.device("cpu"))
    return PagedStep(cache, inputs).attend(0, *qkv, rules)


def by_definition(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rules: AttentionRules) -> torch.Tensor:
    """One head and one token at a time, in float64. All of one sequence: [num_tokens, heads, dim]."""
    output = torch.zeros(query.shape, dtype=torch.float64)
    for at in range(query.shape[0]):
        first = 0 if rules.sliding_window is None else max(0, at + 1 - rules.sliding_window)
        for head in range(NUM_HEADS):
            kv = head // (NUM_HEADS // NUM_KV_HEADS)
            scores = keys[first : at + 1, kv].double() @ query[at, head].double() * rules.scaling
            if rules.softcap is not None:
                scores = torch.tanh(scores / rules.softcap) * rules.softcap
            if rules.sinks is not None:
                scores = torch.cat([scores, rules.sinks[head].double()[None]])
            weights = scores.softmax(-1)[: at + 1 - first]
            output[at, head] = weights @ values[first : at + 1, kv].double()
    return output


ALL_RULES = [
    AttentionRules(scaling=0.3),
    AttentionRules(scaling=0.3, sliding_window=5),
    AttentionRules(scaling=0.3, softcap=1.5),
    AttentionRules(scaling=0.3, sliding_window=3, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
]


@pytest.mark.parametrize("rules", ALL_RULES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_way_of_computing_sequences_gives_what_the_definition_says(
    rules: AttentionRules, data: st.DataObject
) -> None:
    """Three sequences on scattered blocks, computed in random chunks beside each other."""
    lengths = data.draw(st.lists(st.integers(1, 26), min_size=3, max_size=3))
    torch.manual_seed(sum(lengths))
    whole = [
        [torch.randn(n, heads, DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)] for n in lengths
    ]  # fmt: skip
    blocks = torch.randperm(NUM_BLOCKS).tolist()
    tables = [blocks[8 * n : 8 * n + 8] for n in range(3)]
    cache, done = new_cache(), [0, 0, 0]
    outputs: list[list[torch.Tensor]] = [[], [], []]
    while any(at < n for at, n in zip(done, lengths, strict=True)):
        chunks = [
            data.draw(st.integers(0 if sum(done) else 1, min(9, n - at))) if at < n else 0
            for at, n in zip(done, lengths, strict=True)
        ]
        live = [n for n in range(3) if chunks[n]]
        if not live:
            continue
        items = [scheduled(done[n], chunks[n], tables[n]) for n in live]
        qkv = [torch.cat([whole[n][part][done[n] : done[n] + chunks[n]] for n in live]) for part in range(3)]
        for n, output in zip(live, attend(cache, items, qkv, rules).split([chunks[n] for n in live]), strict=True):
            outputs[n].append(output)
            done[n] += chunks[n]
    for n in range(3):
        assert torch.allclose(torch.cat(outputs[n]).double(), by_definition(*whole[n], rules), atol=1e-5)


def test_what_is_not_a_number_in_one_sequence_never_reaches_another() -> None:
    """Blocks are reused and tables padded: whatever lies in slots that are not its own must not matter."""
    torch.manual_seed(0)
    rules = AttentionRules(scaling=0.3)
    poisoned = new_cache()
    everywhere = [torch.full((NUM_BLOCKS * BLOCK_SIZE, heads, DIM), float("nan")) for heads in (NUM_KV_HEADS,) * 2]
    poisoned.write(0, torch.arange(NUM_BLOCKS * BLOCK_SIZE), *everywhere)
    clean = new_cache()
    for start, num_tokens in ((0, 6), (6, 1), (7, 3)):
        items = [scheduled(start, num_tokens, [5, 9, 2]), scheduled(start + 6, 1, [7, 3, 1, 11])]
        qkv = [torch.randn(num_tokens + 1, heads, DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
        results = [attend(cache, items[:1], [t[:-1] for t in qkv], rules) for cache in (clean, poisoned)]
        assert torch.equal(results[0], results[1])
        beside = attend(poisoned, items, qkv, rules)
        assert torch.allclose(beside[:-1], results[0], atol=1e-6)
