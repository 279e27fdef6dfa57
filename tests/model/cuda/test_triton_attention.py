"""Our Triton kernels against the plain torch attention: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from app.build import build_sync_engine
from app.engine.batch import ScheduledSequence
from app.model.attention import AttentionRules, PagedAttention, TorchAttention
from app.model.kv_cache import KVCache, LayerShape
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import DEVICE, attend, config_of, scheduled

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.attention import StepRows, TritonAttention, TritonStep
from app.model.cuda.graph_runner import GraphModelRunner

NUM_BLOCKS = 12
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    key_dim: int = 16
    value_dim: int = 16
    block_size: int = 16
    dtype: torch.dtype = torch.float32

    @property
    def layers(self) -> dict[int, LayerShape]:
        return {0: LayerShape(num_kv_heads=self.num_kv_heads, key_dim=self.key_dim, value_dim=self.value_dim)}

    def tensors(self, num_tokens: int) -> list[torch.Tensor]:
        """Query, key and value as transformers' models hand them over: heads first, seen through a transposition."""
        sizes = ((self.num_heads, self.key_dim), (self.num_kv_heads, self.key_dim), (self.num_kv_heads, self.value_dim))
        return [
            torch.randn(heads, num_tokens, dim).to(DEVICE, self.dtype).transpose(0, 1) for heads, dim in sizes
        ]  # fmt: skip


def plain_torch(shape: Shape) -> PagedAttention:
    size = shape.block_size
    cache = KVCache(shape.layers, num_blocks=NUM_BLOCKS, block_size=size, dtype=shape.dtype, device=DEVICE)
    return TorchAttention(cache, DEVICE)


def triton(
    shape: Shape, *, batch_invariant: bool = False, max_splits: int = 2, kv_dtype: torch.dtype | None = None
) -> TritonAttention:
    """With splits so short that few tokens make several, and more tokens longer ones. kv_dtype: None as all else."""
    return TritonAttention(
        shape.layers, num_blocks=NUM_BLOCKS, block_size=shape.block_size, max_rows=4, max_blocks=NUM_BLOCKS,
        dtype=kv_dtype or shape.dtype, device=DEVICE, batch_invariant=batch_invariant, split_tokens=16,
        max_splits=max_splits,
    )  # fmt: skip


# Two sequences on scattered blocks: a prompt, a prompt beside a single token, a chunk beside one, single tokens alone.
TABLES = ([7, 2, 9, 0, 5], [3, 11, 1, 10])
STEPS = (((0, 21), None), ((21, 1), (0, 5)), ((22, 18), (5, 1)), ((40, 1), (6, 30)), ((41, 1), (36, 1)))


def items_of(places: Sequence[tuple[int, int] | None], tables: Sequence[list[int]] = TABLES) -> list[ScheduledSequence]:
    """places: of each sequence the first new token's position and their number; None: it is not in the step."""
    both = zip(places, tables, strict=True)
    return [scheduled(place[1], place[0], table) for place, table in both if place is not None]


def assert_all_steps_agree(
    shape: Shape,
    rules: AttentionRules,
    stored: Callable[[torch.Tensor], torch.Tensor] = lambda heads: heads,
    **options: Any,
) -> None:
    """stored: keys and values as the KV memory holds them."""
    torch.manual_seed(0)
    ours, reference = triton(shape, **options), plain_torch(shape)
    for step in STEPS:
        items = items_of(step)
        query, key, value = shape.tensors(sum(len(item.token_ids) for item in items))
        mine = attend(ours, items, [query, key, value], rules)
        right = attend(reference, items, [query, stored(key), stored(value)], rules)
        assert mine.dtype is shape.dtype
        torch.testing.assert_close(mine.float(), right.float(), atol=TOLERANCE[shape.dtype], rtol=1e-3)


@pytest.mark.parametrize(
    "rules",
    [
        AttentionRules(scaling=0.25),
        AttentionRules(scaling=0.25, sliding_window=5),
        AttentionRules(scaling=0.25, sliding_window=20),
        AttentionRules(scaling=0.25, softcap=1.5),
        AttentionRules(scaling=0.25, sinks=torch.tensor([0.5, -1.0, 2.0, 0.0], device=DEVICE)),
    ],
    ids=["plain", "short window", "long window", "softcap", "sinks"],
)
def test_every_rule_gives_what_plain_torch_gives(rules: AttentionRules) -> None:
    assert_all_steps_agree(Shape(), rules)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    assert_all_steps_agree(Shape(dtype=dtype), AttentionRules(scaling=0.25))


@pytest.mark.parametrize(
    "shape",
    [
        Shape(num_heads=2),
        Shape(num_heads=3, num_kv_heads=1),
        Shape(num_heads=8, num_kv_heads=1, key_dim=48, value_dim=32),
        Shape(num_heads=2, num_kv_heads=1, key_dim=64, value_dim=64, block_size=32),
        Shape(num_heads=5, num_kv_heads=1, key_dim=128, value_dim=128, block_size=48),
        Shape(num_heads=71, num_kv_heads=1),
        Shape(num_heads=3, num_kv_heads=3, key_dim=24, value_dim=40, dtype=torch.bfloat16),
    ],
    ids=lambda shape: f"{shape.num_heads}/{shape.num_kv_heads} {shape.key_dim}/{shape.value_dim} {shape.block_size}",
)
def test_every_shape_gives_what_plain_torch_gives(shape: Shape) -> None:
    assert_all_steps_agree(shape, AttentionRules(scaling=0.2))


def test_more_splits_than_are_joined_at_once_become_longer_ones() -> None:
    assert_all_steps_agree(Shape(), AttentionRules(scaling=0.25), max_splits=1)
    assert_all_steps_agree(Shape(), AttentionRules(scaling=0.25), max_splits=8)


def test_what_is_not_a_number_in_one_sequence_never_reaches_another() -> None:
    """Blocks are reused: whatever lies in slots that are not a sequence's own must not matter."""
    shape, rules = Shape(), AttentionRules(scaling=0.25)
    poisoned, clean = triton(shape), triton(shape)
    for tensor in poisoned.cache.layer(0):
        tensor.fill_(float("nan"))
    torch.manual_seed(0)
    for start, num_tokens in ((0, 6), (6, 1), (7, 20)):
        item, qkv = scheduled(num_tokens, start, TABLES[0]), shape.tensors(num_tokens)
        assert torch.equal(attend(poisoned, [item], qkv, rules), attend(clean, [item], qkv, rules))


def check_pieces(shape: Shape, kv_dtype: torch.dtype | None = None) -> None:
    """A sequence at once and alone has the bits of one in pieces, each beside as large a piece of another sequence."""
    qkv, rules = shape.tensors(60), AttentionRules(scaling=0.2, sliding_window=37)

    def computed(sizes: list[int], *, has_neighbour: bool) -> torch.Tensor:
        attention, outputs, at = triton(shape, batch_invariant=True, kv_dtype=kv_dtype), [], 0
        for size in sizes:
            tensors, items = [t[at : at + size] for t in qkv], [scheduled(size, at, TABLES[0])]
            if has_neighbour:
                tensors = [torch.cat([torch.ones_like(t), t]) for t in tensors]
                items = [scheduled(size, at, TABLES[1]), *items]
            outputs.append(attend(attention, items, tensors, rules)[-size:])
            at += size
        return torch.cat(outputs)

    assert torch.equal(computed([60], has_neighbour=False), computed([33, 5, 1, 1, 20], has_neighbour=True))


@pytest.mark.usefixtures("equal_rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_invariant_rows_do_not_depend_on_the_pieces_they_were_computed_in(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    check_pieces(Shape(num_heads=3, num_kv_heads=1, key_dim=24, value_dim=16, dtype=dtype))


def test_a_row_does_not_depend_on_its_neighbours_or_on_how_many_there_are() -> None:
    torch.manual_seed(0)
    shape, rules = Shape(dtype=torch.bfloat16), AttentionRules(scaling=0.2)
    together, alone = triton(shape), triton(shape)
    for places in (((0, 50), (0, 30)), ((50, 1), (30, 1)), ((51, 1), (31, 20))):
        items = items_of(places)
        size = places[0][1]
        qkv = shape.tensors(size + places[1][1])
        result = attend(together, items, qkv, rules)
        assert torch.equal(result[:size], attend(alone, items[:1], [t[:size] for t in qkv], rules))


def test_a_step_of_facts_that_lie_on_the_device_is_the_same_step_and_its_spare_rows_touch_nothing() -> None:
    torch.manual_seed(0)
    shape, rules = Shape(), AttentionRules(scaling=0.2)
    eager, static = triton(shape), triton(shape)
    prompt = shape.tensors(33)
    for attention in (eager, static):
        attend(attention, [scheduled(33, 0, TABLES[0])], prompt, rules)
    item, qkv = scheduled(1, 33, TABLES[0]), shape.tensors(1)
    expected = attend(eager, [item], qkv, rules)
    row = static.tables.update([item.block_ids])[0]
    slots = torch.tensor([TABLES[0][2] * 16 + 1, static.scratch_slot, static.scratch_slot], device=DEVICE)
    spare = static.tables.scratch_row
    segments = torch.tensor([[0, 1, 2], [1, 1, 1], [33, 0, 0], [row, spare, spare]], device=DEVICE)
    padded = [torch.cat([t, torch.randn(2, *t.shape[1:]).to(t)]) for t in qkv]
    result = TritonStep(static, [StepRows(slots, single=segments, pieces=None)]).attend(0, *padded, rules)
    assert torch.equal(result[:1], expected)
    for mine, theirs in zip(static.cache.layer(0), eager.cache.layer(0), strict=True):
        assert torch.equal(mine[:NUM_BLOCKS], theirs[:NUM_BLOCKS])


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2"])  # with grouped heads, a window and a cap; without
def test_an_engine_takes_it_where_it_fits_and_generates_the_same_tokens(
    architecture: str, tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of(
        tiny_model_path(architecture), cache={"block_size": 4, "num_blocks": 20}, device="auto", dtype="float32",
        scheduler={"max_running": 3, "max_step_tokens": 16, "prefill_chunk_tokens": 9},
    )  # fmt: skip
    prompts = (tuple(range(3, 15)), (5, 6, 7))
    requests = [make_request(prompt, max_tokens=3, ignore_eos=True) for prompt in prompts]
    tokens = []
    for fits in (True, False):
        monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda device, fits=fits: fits))
        engine = build_sync_engine(config.with_setting("model.backend", "triton" if fits else "torch"))
        assert isinstance(engine.runner, GraphModelRunner) is fits  # type: ignore[attr-defined]
        tokens.append(run_to_end(engine, *requests).token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.gpu
@pytest.mark.skipif(
    DEVICE.type != "cuda", reason="real sizes are too slow for Triton's interpreter; needs a CUDA device"
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_real_sizes_on_a_gpu(dtype: torch.dtype) -> None:
    shape = Shape(num_heads=32, num_kv_heads=8, key_dim=128, value_dim=128, dtype=dtype)
    rules = AttentionRules(scaling=128**-0.5)
    blocks = torch.randperm(1200, generator=torch.Generator().manual_seed(0)).tolist()
    tables = [blocks[:600], blocks[600:]]
    options = {"num_blocks": 1200, "block_size": 16, "dtype": dtype, "device": DEVICE}
    reference = TorchAttention(KVCache(shape.layers, **options), DEVICE)  # type: ignore[arg-type]
    ours = TritonAttention(shape.layers, max_rows=2, max_blocks=600, **options)  # type: ignore[arg-type]
    torch.manual_seed(0)
    for places in (((0, 4000), (0, 1)), ((4000, 5000), (1, 700)), ((9000, 1), (701, 1)), ((9001, 1), (702, 33))):
        items = items_of(places, tables)
        qkv = shape.tensors(sum(place[1] for place in places))
        mine, right = (attend(attention, items, qkv, rules) for attention in (ours, reference))
        torch.testing.assert_close(mine.float(), right.float(), atol=TOLERANCE[dtype], rtol=1e-2)
