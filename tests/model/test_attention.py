from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from app.engine.batch import ScheduledSequence
from app.model.attention import AttentionRules, PagedAttention, TorchAttention
from app.model.cpu.attention import NativeAttention
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import ThreadPool, library
from app.model.kv_cache import KVCache, LayerShape
from tests.kit.models import CPU, attend, poison, scheduled
from tests.model.cpu.builds import IN_TILES, built_with

NUM_BLOCKS, NUM_HEADS, NUM_KV_HEADS, DIM = 24, 4, 2, 16
LAYERS = {0: LayerShape(num_kv_heads=NUM_KV_HEADS, key_dim=DIM, value_dim=DIM)}
# Type of numbers, whether they go through tiles of the matrix unit, and whether KV memory is in int8.
NATIVE = [
    (dtype, in_tiles, in_int8)
    for dtype, in_tiles in ((torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True))
    for in_int8 in (False, True)
]


def torch_attention() -> PagedAttention:
    return TorchAttention(KVCache(LAYERS, num_blocks=NUM_BLOCKS, block_size=4, dtype=torch.float32, device=CPU), CPU)


def with_native_attention() -> PagedAttention:
    return native_attention(LAYERS, num_blocks=NUM_BLOCKS, dtype=torch.float32)


def native_attention(
    layers: dict[int, LayerShape],
    *,
    num_blocks: int,
    dtype: torch.dtype,
    num_threads: int = 2,
    in_tiles: bool = False,
    in_int8: bool = False,
    in_pieces: bool = False,
) -> NativeAttention:
    """Its memory has no numbers in it (NaN)."""
    if library() is None:
        pytest.skip("no C++ compiler here")
    pages = NativeKVCache(layers, num_blocks=num_blocks, block_size=16, dtype=dtype, in_int8=in_int8)
    poison(pages)
    with built_with(*IN_TILES) if in_tiles or in_pieces else nullcontext():
        return NativeAttention(pages, ThreadPool(num_threads))


BACKENDS = [torch_attention, with_native_attention]


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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rules", ALL_RULES)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_way_of_computing_sequences_gives_what_the_definition_says(
    rules: AttentionRules, backend: Callable[[], PagedAttention], data: st.DataObject
) -> None:
    """Three sequences on scattered blocks, computed in random chunks beside each other."""
    lengths = data.draw(st.lists(st.integers(1, 32), min_size=3, max_size=3))
    torch.manual_seed(sum(lengths))
    whole = [
        [torch.randn(n, heads, DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)] for n in lengths
    ]  # fmt: skip
    blocks = torch.randperm(NUM_BLOCKS).tolist()
    tables = [blocks[8 * n : 8 * n + 8] for n in range(3)]
    attention, done = backend(), [0, 0, 0]
    outputs: list[list[torch.Tensor]] = [[], [], []]
    while unfinished := [n for n in range(3) if done[n] < lengths[n]]:
        # One of them goes on in every step: steps of nothing would use up what an example may draw.
        leader = data.draw(st.sampled_from(unfinished))
        chunks = [0, 0, 0]
        for n in unfinished:
            chunks[n] = data.draw(st.integers(n == leader, min(9, lengths[n] - done[n])))
        live = [n for n in range(3) if chunks[n]]
        items = [scheduled(chunks[n], done[n], tables[n]) for n in live]
        qkv = [torch.cat([whole[n][part][done[n] : done[n] + chunks[n]] for n in live]) for part in range(3)]
        for n, output in zip(live, attend(attention, items, qkv, rules).split([chunks[n] for n in live]), strict=True):
            outputs[n].append(output)
            done[n] += chunks[n]
    for n in range(3):
        assert torch.allclose(torch.cat(outputs[n]).double(), by_definition(*whole[n], rules), atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_not_a_number_in_one_sequence_never_reaches_another(backend: Callable[[], PagedAttention]) -> None:
    """Blocks are reused and tables padded: whatever lies in slots that are not its own must not matter."""
    torch.manual_seed(0)
    rules = AttentionRules(scaling=0.3)
    poisoned, clean = backend(), backend()
    size = poisoned.block_size
    poison = [torch.full((NUM_BLOCKS * size, heads, DIM), float("nan")) for heads in (NUM_HEADS, *(NUM_KV_HEADS,) * 2)]
    attend(poisoned, [scheduled(NUM_BLOCKS * size, 0, list(range(NUM_BLOCKS)))], poison, rules)
    for start, num_tokens in ((0, 6), (6, 1), (7, 3)):
        items = [scheduled(num_tokens, start, [5, 9, 2]), scheduled(1, start + 6, [7, 3, 1, 11])]
        qkv = [torch.randn(num_tokens + 1, heads, DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
        results = [attend(attention, items[:1], [t[:-1] for t in qkv], rules) for attention in (clean, poisoned)]
        assert torch.equal(results[0], results[1])
        beside = attend(poisoned, items, qkv, rules)
        assert torch.allclose(beside[:-1], results[0], atol=1e-6)


@pytest.mark.parametrize(("dtype", "in_tiles", "in_int8"), NATIVE)
@pytest.mark.parametrize("num_heads", [1, 3, 14, 32])
def test_the_native_rows_do_not_depend_on_what_shares_their_step(
    dtype: torch.dtype, in_tiles: bool, in_int8: bool, num_heads: int
) -> None:
    """Bit for bit: whole, in chunks, and beside another sequence; also more query heads than a tile holds."""
    dim, value_dim = (96, 80) if in_tiles else (24, 48)
    layers = {0: LayerShape(num_kv_heads=1, key_dim=dim, value_dim=value_dim)}
    torch.manual_seed(0)
    rules = AttentionRules(scaling=dim**-0.5, sliding_window=37)
    shapes = ((num_heads, dim), (1, dim), (1, value_dim))
    qkv = [torch.randn(70, *shape).to(dtype) for shape in shapes]

    def run(chunks: list[int], *, beside: bool) -> torch.Tensor:
        attention = native_attention(layers, num_blocks=12, dtype=dtype, in_tiles=in_tiles, in_int8=in_int8)
        outputs, at = [], 0
        for size in chunks:
            items, tensors = [scheduled(size, at, [3, 8, 1, 0, 9])], [t[at : at + size] for t in qkv]
            if beside:
                items, tensors = [scheduled(size, at, [2, 7, 4, 5, 6]), *items], [torch.cat([t, t]) for t in tensors]
            outputs.append(attend(attention, items, tensors, rules)[-size:])
            at += size
        return torch.cat(outputs)

    whole = run([70], beside=False)
    assert torch.equal(whole, run([1] * 70, beside=False))
    assert torch.equal(whole, run([33, 5, 32], beside=True))
    keys, values = qkv[1][:, 0].double(), qkv[2][:, 0].double()
    scores = qkv[0][69].double() @ keys[33:70].T * rules.scaling
    assert torch.allclose(
        whole[69].double(),
        scores.softmax(-1) @ values[33:70],
        atol=2e-2 if in_int8 or dtype is torch.bfloat16 else 1e-5,
    )


@pytest.mark.parametrize(("dtype", "in_tiles"), [each[:2] for each in NATIVE if each[2]])
@pytest.mark.parametrize("rules", ALL_RULES)
def test_in_int8_the_output_is_that_of_the_rounded_keys_and_values(
    rules: AttentionRules, dtype: torch.dtype, in_tiles: bool
) -> None:
    """Each token's key and value of each head in steps of its greatest number / 127; those of its own step too."""
    torch.manual_seed(0)
    dim = 2 * DIM if in_tiles else DIM
    layers = {0: LayerShape(num_kv_heads=NUM_KV_HEADS, key_dim=dim, value_dim=dim)}
    attention = native_attention(layers, num_blocks=5, dtype=dtype, in_tiles=in_tiles, in_int8=True)
    query, key, value = (torch.randn(70, heads, dim).to(dtype) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS))
    key[:, :, 3] *= 20  # a great one, which makes the steps of all others wide
    key[7] = 0
    outputs = [
        attend(attention, [scheduled(end - start, start, [3, 1, 0, 4, 2])],
               [part[start:end] for part in (query, key, value)], rules)
        for start, end in ((0, 50), (50, 69), (69, 70))
    ]  # fmt: skip
    expected = by_definition(query, rounded_to_int8(key), rounded_to_int8(value), rules)
    error = (torch.cat(outputs).double() - expected).abs()
    # In bfloat16 weights and outputs are rounded to 8 bits each, by 1 / 256 of a value at most.
    assert float(error.max()) < (1e-5 if dtype is torch.float32 else 2 / 256 * float(value.abs().max()))


def rounded_to_int8(rows: torch.Tensor) -> torch.Tensor:
    greatest = rows.float().abs().amax(-1, keepdim=True)
    numbers = (rows.float() * (127 / greatest)).nan_to_num().round()  # in float32: bfloat16 has numbers in the middle
    return numbers.double() * (greatest / 127).double()


def test_in_int8_a_token_without_a_number_shows_in_its_sequence_alone() -> None:
    torch.manual_seed(0)
    attention = native_attention(LAYERS, num_blocks=4, dtype=torch.float32, in_int8=True)
    items = [scheduled(20, 0, [0, 1]), scheduled(20, 0, [2, 3])]
    qkv = [torch.randn(40, heads, DIM) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    expected = attend(attention, items, qkv, AttentionRules(scaling=0.3))
    for part, bad in ((1, float("nan")), (2, float("inf"))):
        poisoned = [each.clone() for each in qkv]
        poisoned[part][15, :, 5] = bad
        output = attend(attention, items, poisoned, AttentionRules(scaling=0.3))
        assert output[19].isnan().all()
        assert torch.equal(output[20:], expected[20:])


@pytest.mark.parametrize(
    ("dtype", "in_tiles", "in_int8", "heads_per_kv"),
    # Every pair of a kind and a number of heads; numbers in int8 are read by the same code for all numbers of heads.
    [(*kind, heads) for kind in NATIVE for heads in ((4,) if kind[2] else (1, 14))],
)
@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_native_rows_that_read_shared_blocks_together_have_the_bits_of_each_alone(
    dtype: torch.dtype, in_tiles: bool, in_int8: bool, heads_per_kv: int, data: st.DataObject
) -> None:
    """Sequences that begin with blocks of others, decodes beside prefill pieces: a step of all and of each."""
    rules = data.draw(st.sampled_from([
        AttentionRules(scaling=0.3),
        AttentionRules(scaling=0.3, softcap=1.5),
        AttentionRules(scaling=0.3, sliding_window=43),
        AttentionRules(scaling=0.3, sliding_window=90, sinks=torch.linspace(-1.0, 2.0, 2 * heads_per_kv)),
    ]))  # fmt: skip
    dim = 2 * DIM if in_tiles else DIM
    attention = native_attention(
        {0: LayerShape(num_kv_heads=NUM_KV_HEADS, key_dim=dim, value_dim=dim)},
        num_blocks=400, dtype=dtype, num_threads=data.draw(st.integers(1, 2)), in_tiles=in_tiles, in_int8=in_int8,
    )  # fmt: skip
    torch.manual_seed(data.draw(st.integers(0, 999)))

    def random_qkv(num_tokens: int) -> list[torch.Tensor]:
        return [torch.randn(num_tokens, heads, dim).to(dtype) for heads in (2 * heads_per_kv, 2, 2)]

    free = torch.randperm(400).tolist()
    tables: list[list[int]] = []
    items: list[ScheduledSequence] = []
    for number in range(data.draw(st.integers(1, 40))):
        parent = data.draw(st.integers(0, max(0, number - 1)))
        shared = data.draw(st.integers(0, items[parent].start // 16)) if number else 0
        start, num_tokens = 16 * shared + data.draw(st.integers(0, 70)), data.draw(st.sampled_from([1, 1, 1, 1, 5]))
        own = [free.pop() for _ in range((start + num_tokens - 1) // 16 + 1 - shared)]
        tables.append([*(tables[parent][:shared] if number else ()), *own])
        if start > 16 * shared:
            filled = scheduled(start - 16 * shared, 16 * shared, tables[-1])
            attend(attention, [filled], random_qkv(start - 16 * shared), rules)
        items.append(scheduled(num_tokens, start, tables[-1]))
        if len(free) < 40:
            break
    sizes = [len(item.token_ids) for item in items]
    qkv = random_qkv(sum(sizes))
    together = attend(attention, items, qkv, rules).split(sizes)
    alone = zip(*(part.split(sizes) for part in qkv), strict=True)
    for item, own_qkv, rows in zip(items, alone, together, strict=True):
        assert torch.equal(rows, attend(attention, [item], list(own_qkv), rules))
        assert not rows.isnan().any()


@pytest.mark.parametrize(("dtype", "in_tiles", "in_int8"), NATIVE)
@pytest.mark.parametrize(
    "rules",
    [
        AttentionRules(scaling=0.3, softcap=1.5),
        AttentionRules(scaling=0.3, sliding_window=110, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    ],
)
def test_rows_of_long_sequences_have_the_same_bits_by_any_number_of_threads(
    rules: AttentionRules, dtype: torch.dtype, in_tiles: bool, in_int8: bool
) -> None:
    """Several pieces of keys: as prompts, and one token after the other alone (three threads share the pieces), beside
    others (each thread has whole sequences) and beside one that begins with the same blocks."""
    num_prompt, num_all, num_others = 272, 275, 30
    dim = 2 * DIM if in_tiles else DIM
    layers = {0: LayerShape(num_kv_heads=NUM_KV_HEADS, key_dim=dim, value_dim=dim)}
    torch.manual_seed(0)
    qkv = [torch.randn(num_all, heads, dim).to(dtype) for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)]
    table = torch.randperm(18).tolist()

    def others(at: int) -> list[ScheduledSequence]:
        return [scheduled(1, 0, [19 + number]) for number in range(num_others)]

    def sibling(at: int) -> list[ScheduledSequence]:
        return [scheduled(1, at, [*table[: num_prompt // 16], 18])]

    def run(num_threads: int, chunks: list[int], beside: Callable[[int], list[ScheduledSequence]]) -> torch.Tensor:
        attention = native_attention(
            layers, num_blocks=19 + num_others, dtype=dtype, num_threads=num_threads, in_int8=in_int8, in_pieces=True
        )
        outputs, at = [], 0
        for size in chunks:
            before = beside(at) if size == 1 else []
            items, tensors = [*before, scheduled(size, at, table)], [part[at : at + size] for part in qkv]
            tensors = [torch.cat([*(part,) * len(before), part]) for part in tensors]
            outputs.append(attend(attention, items, tensors, rules)[-size:])
            at += size
        return torch.cat(outputs)

    one_by_one = [num_prompt] + [1] * (num_all - num_prompt)
    whole = run(1, [num_all], lambda at: [])
    assert torch.equal(whole, run(2, [100, 30, num_all - 130], lambda at: []))
    assert torch.equal(whole, run(1, one_by_one, lambda at: []))
    for beside in (lambda at: [], others, sibling):
        assert torch.equal(whole, run(3, one_by_one, beside))
    keys, values = map(rounded_to_int8, qkv[1:]) if in_int8 else qkv[1:]
    error = (whole.double() - by_definition(qkv[0], keys, values, rules)).abs()
    assert float(error.max()) < (1e-5 if dtype is torch.float32 else 2 / 256 * float(qkv[2].abs().max()))
