"""What steps cost a GPU, counted without one: launches, waits, bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import FILTERS
from app.model.attention import AttentionRules
from app.model.implementations.cuda_decoder import CudaModel
from app.model.implementations.loaded_model import LoadedModel
from app.model.inputs import build_inputs
from app.model.kv_cache import LayerShape
from app.model.sampler import Sampler
from tests.kit.models import CPU, load, scheduled
from tests.tiny_models import build_tiny_model

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")
if torch.cuda.is_available():
    pytest.skip("counted in Triton's interpreter", allow_module_level=True)

from app.model.cuda.attention import TritonAttention
from app.model.cuda.captured_inputs import StepSize, decode_size
from app.model.cuda.decoder import num_kernels_of
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.cuda.sampler import ROW_LAYOUT, TritonSampler
from tests.model.cuda.counting import Counts, counting

BYTES = torch.bfloat16.itemsize
DECODE = decode_size(4)
VOCAB_SIZE = 4096


def loaded(path: Path, backend: str = "torch") -> LoadedModel:
    """backend: auto for our decoder, which is compared with transformers' code elsewhere."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TritonAttention, "fits", staticmethod(lambda device: device.type != "meta" and backend == "auto"))
        patch.setattr(CudaModel, "output", lambda model, source: model.reference.own)
        return load(path, device="auto", dtype="bfloat16", backend=backend)


def runner_of(model: LoadedModel, *, split_tokens: int = 16) -> GraphModelRunner:
    """Of 32 tokens, in two splits of keys."""
    attention = TritonAttention(
        model.layers, num_blocks=8, block_size=4, max_rows=6, max_blocks=8, dtype=model.dtype, device=model.device,
        split_tokens=split_tokens,
    )  # fmt: skip
    return GraphModelRunner(model, attention, max_rows=6, capture=None, sampler=TritonSampler(CPU))


def saved(architecture: str, folder: Path, num_layers: int) -> Path:
    """A model of layers that are all alike."""
    path = folder / str(num_layers)
    build_tiny_model(
        architecture, num_hidden_layers=num_layers, layer_types=["full_attention"] * num_layers, mlp_only_layers=[]
    ).save_pretrained(path)
    return path


def counted(model: LoadedModel, size: StepSize) -> Counts:
    runner = runner_of(model)
    with counting(computes=False) as counts:
        runner.compute_padding(size)
    return counts


@pytest.mark.parametrize(("architecture", "most"), [("llama", 40), ("qwen3", 56), ("mixtral", 58)])
def test_launches_of_a_layer_in_transformers_code(architecture: str, most: int, tmp_path: Path) -> None:
    """What our own decoder is there to lower."""
    two, three = (counted(loaded(saved(architecture, tmp_path, n)), DECODE) for n in (2, 3))
    assert three.num_launches - two.num_launches <= most
    assert [each.kernel for each in three.kernels] == 3 * ["write_kernel", "decode_kernel", "reduce_kernel"]
    assert not three.waits


def test_nothing_is_reduced_where_the_longest_sequence_is_one_split(tiny_model_path: Callable[[str], Path]) -> None:
    runner = runner_of(loaded(tiny_model_path("llama")), split_tokens=32)
    with counting(computes=False) as counts:
        runner.compute_padding(decode_size(2))
    assert [each.kernel for each in counts.kernels] == 2 * ["write_kernel", "decode_kernel"]


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe", "qwen2_moe"])  # others launch the same kernels
def test_a_layer_takes_ten_launches_in_our_decoder_and_one_more_each_for_prompts_and_experts(
    architecture: str, tmp_path: Path
) -> None:
    model = loaded(saved(architecture, tmp_path, 2), "auto")
    assert isinstance(model, CudaModel)
    first = replace(model, weights=replace(model.weights, layers=model.weights.layers[:1]))
    has_experts = architecture != "llama"
    of_mlp = ["route_kernel", "expert_gate_kernel", "expert_down_kernel"] if has_experts else ["gate_kernel"]
    for size in (DECODE, StepSize(8, 4, 2)):
        one, two = counted(first, size), counted(model, size)
        of_attention = ["decode_kernel", "reduce_kernel", *["prefill_kernel"] * size.is_mixed]
        of_layer = ["add_norm_kernel", "rotate_write_kernel", *of_attention, "add_norm_kernel", *of_mlp]
        assert [each.kernel for each in two.kernels] == [*2 * of_layer, "add_norm_kernel"]
        assert len(two.kernels) == num_kernels_of(model.weights) + 2 * size.is_mixed
        # Products: of queries, keys and values, of attention's output; and two of an MLP, or that of the router.
        assert two.num_launches - one.num_launches == 10 + size.is_mixed + has_experts <= 12
        assert not two.waits


def item(token_ids: Sequence[int], start: int, block_ids: list[int], **given: Any) -> ScheduledSequence:
    model_info = {"banned_token_ids": given.pop("banned", ())}
    sampling = {"temperature": 0.0, "prompt": tuple(token_ids), "generated": (7, 8, 7)} | given
    return scheduled(token_ids, start, block_ids, model_info=model_info, vocab_size=VOCAB_SIZE, **sampling)


SAMPLED: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.8, "seed": 3},
    **{name: {"temperature": 0.8, "seed": 3, name: value} for name, value in FILTERS.items()},
    "filtered": {"temperature": 0.8, "seed": 3, **FILTERS},
    "penalised": {"presence_penalty": 0.5, "repetition_penalty": 1.2, "logit_bias": ((3, 1.0),)},
    "banned": {"banned": (2, 3)},
    "grammar": {"allowed": range(0, 64, 3), "banned": (3,), "temperature": 0.8, "top_p": 0.9},
    "all": {
        "allowed": range(0, 64, 3), "frequency_penalty": 0.5, "temperature": 0.8, "top_p": 0.9, "logprobs": 5,
    },
    "log-probabilities": {"logprobs": 2},
}  # fmt: skip


@pytest.mark.parametrize(("how", "has_prompt"), [*((how, False) for how in SAMPLED), ("greedy", True), ("all", True)])
@torch.inference_mode()
def test_the_host_never_waits_between_a_batch_and_its_tokens(
    how: str, tiny_model_path: Callable[[str], Path], *, has_prompt: bool
) -> None:
    items = [item([5], 9, [1, 2, 3], **SAMPLED[how]), item([6], 4, [4, 5])]
    if has_prompt:
        items.append(item(range(7), 0, [6, 7]))
    runner = runner_of(loaded(tiny_model_path("llama")))
    has_logprobs = "logprobs" in SAMPLED[how]
    with counting(computes=False) as counts:
        launched = runner.launch(StepBatch(tuple(items), tuple(items), has_logprobs=has_logprobs))
    assert counts.waits == []
    of_sampling = ["draw_kernel", "logprobs_kernel"] if has_logprobs else ["draw_kernel"]
    assert [each.kernel for each in counts.kernels if each.kernel in of_sampling] == of_sampling
    assert len(launched.result().token_ids) == len(items)
    with counting() as counts:
        launched.result()
    assert set(counts.waits) == {"tolist"}


@torch.inference_mode()
def test_drafts_take_no_launch_of_their_own_and_the_host_does_not_wait_for_them(
    tiny_model_path: Callable[[str], Path],
) -> None:
    launches = []
    for has_drafts in (False, True):
        items = (item([5, 6, 7], 9, [1, 2, 3]), item([6], 4, [4, 5]))
        runner = runner_of(loaded(tiny_model_path("llama")))
        with counting(computes=False) as counts:
            launched = runner.launch(StepBatch(items, items, has_drafts=has_drafts))
        assert counts.waits == []
        assert len(launched.result().token_ids) == (4 if has_drafts else 2)
        launches.append([each.kernel for each in counts.kernels])
    assert launches[0] == launches[1]


def sampled(*items: ScheduledSequence) -> tuple[Counts, torch.Tensor]:
    """Draws from bfloat16 logits of 4,096 tokens, with log-probabilities where they are wanted."""
    logits = torch.randn(len(items), VOCAB_SIZE).bfloat16()
    sampler = TritonSampler(CPU)
    num_top = items[0].sampling.logprobs
    with counting() as counts:
        tokens = sampler.sample(logits, items)
        if num_top is not None:
            sampler.logprobs(logits, range(len(items)), tokens, num_top=num_top)
    return counts, logits


# Passes over the logits beside the one that draws: one for the greatest logit, 4 digits of a bfloat16 for an edge.
PASSES = {"top_k": 4, "top_p": 5, "min_p": 1, "top_n_sigma": 3}


@pytest.mark.parametrize(
    ("how", "passes", "of_token", "beside"),
    # of_token: bytes beside the logit. beside: bytes of a row's entries, bans and their logits.
    [
        ("greedy", 1, 0, 0), ("drawn", 1, 0, 0), *((name, 1 + PASSES[name], 0, 0) for name in FILTERS),
        ("filtered", 12, 0, 0),  # the greatest logit is found once
        ("penalised", 1, 1 / 8, 4 * 42),
        ("banned", 1, 1 / 8, 16), ("grammar", 6, 1 / 8, 0),
    ],
)  # fmt: skip
def test_draws_read_logits_and_a_bit_for_each_token(how: str, passes: int, of_token: float, beside: int) -> None:
    counts, logits = sampled(*[item([5], 9, [1], **SAMPLED[how])] * 2)
    assert [each.kernel for each in counts.kernels] == ["draw_kernel"]
    assert not set(counts.operators) & {"index", "_to_copy", "copy_", "sort", "index_put_", "clone", "argmax"}
    assert not counts.waits
    moved = counts.traffic("draw_kernel")
    of_rows = len(logits) * ROW_LAYOUT.size * 8
    least = logits.nbytes + logits.numel() * of_token
    assert least <= moved.read <= least + of_rows + len(logits) * beside
    # Eight tokens load the same byte of bits.
    most = passes * (logits.nbytes + logits.numel() * of_token * 8)
    assert moved.loaded <= most + 2 * (of_rows + len(logits) * beside)


def test_the_plain_sampler_does_not_wait_for_the_device_either() -> None:
    items = [item([5], 9, [1], **each) for each in SAMPLED.values()]
    logits = torch.randn(len(items), VOCAB_SIZE)
    with counting() as counts:
        Sampler().sample(logits, items)
    assert not counts.waits


def test_log_probabilities_read_logits_for_the_greatest_the_sum_and_the_likeliest() -> None:
    counts, logits = sampled(*[item([5], 9, [1], logprobs=2)] * 2)
    assert [each.kernel for each in counts.kernels] == ["draw_kernel", "logprobs_kernel"]
    moved = counts.traffic("logprobs_kernel")
    assert moved.read <= logits.nbytes * 1.02
    assert moved.loaded <= logits.nbytes * (1 + 1 + 4 + 1) * 1.02  # four digits of a bfloat16
    assert moved.written == 2 * (4 + 4 + 8 + 2 * (4 + 8))  # the normaliser, the token, its rank, and the likeliest


def attended(sizes: list[tuple[int, int]], *, num_heads: int = 8, num_kv_heads: int = 2, dim: int = 128) -> Counts:
    """sizes: of each sequence the first new token's position and the number of new tokens."""
    block_size, num_blocks = 16, 64
    attention = TritonAttention(
        {0: LayerShape(num_kv_heads=num_kv_heads, key_dim=dim, value_dim=dim)}, num_blocks=num_blocks,
        block_size=block_size, max_rows=4, max_blocks=num_blocks, dtype=torch.bfloat16, device=CPU,
    )  # fmt: skip
    firsts = accumulate((-(-(start + size) // block_size) for start, size in sizes), initial=0)
    items = tuple(
        scheduled(size, start, list(range(first, first - (-(start + size) // block_size))))
        for (start, size), first in zip(sizes, firsts, strict=False)
    )
    batch = StepBatch(items, ())
    num_tokens = sum(size for _, size in sizes)
    query, key, value = (
        torch.randn(num_tokens, n, dim, dtype=torch.bfloat16) for n in (num_heads, *2 * [num_kv_heads])
    )
    step = attention.begin_step(batch, build_inputs(batch, block_size=block_size, device=CPU))
    with counting() as counts:
        step.attend(0, query, key, value, AttentionRules(scaling=0.1))  # type: ignore[attr-defined]
    return counts


def test_new_keys_and_values_are_moved_once() -> None:
    moved = attended([(99, 1), (16, 1)]).traffic("write_kernel")
    new = 2 * 2 * 2 * 128 * BYTES  # tokens, keys and values, heads, numbers
    assert moved.written == moved.stored == new
    assert moved.read == new + 2 * 8  # and the slots


def test_single_tokens_read_each_key_and_value_once() -> None:
    positions = (799, 16)
    moved = attended([(position, 1) for position in positions]).traffic("decode_kernel")
    of_cache = sum(position + 1 for position in positions) * 2 * 2 * 128 * BYTES
    least = of_cache + 2 * 8 * 128 * BYTES  # and the queries
    model_info = sum(-(-(position + 1) // 16) for position in positions) * 8 + 2 * 3 * 8
    assert least < moved.read <= least + model_info
    # Each key's place is looked up by itself: 8 bytes beside 2 * 128 numbers. A query is read again by each lane.
    assert moved.loaded <= 1.03 * least
    num_splits = 4  # of 256 keys, of the first; the second is one split, and has its outputs from here
    assert moved.stored == moved.written == num_splits * 8 * (128 + 2) * 4 + 8 * 128 * BYTES


def test_partial_results_are_read_once_and_only_where_there_are_any() -> None:
    moved = attended([(799, 1), (16, 1)]).traffic("reduce_kernel")
    assert moved.read - 2 * 2 * 8 <= 4 * 8 * (128 + 2) * 4
    assert moved.written == moved.stored == 8 * 128 * BYTES


def test_a_piece_of_a_prompt_reads_what_it_attends_to_once_for_each_tile_of_tokens() -> None:
    start, size = 64, 96
    moved = attended([(start, size)]).traffic("prefill_kernel")
    tokens_in_tile = 128 // 4
    of_cache = (start + size) * 2 * 2 * 128 * BYTES
    of_queries = size * 8 * 128 * BYTES
    assert moved.read <= of_cache + of_queries + (start + size) // 16 * 8 + size // tokens_in_tile * 4 * 8
    seen = sum(range(start + tokens_in_tile, start + size + 1, tokens_in_tile)) * 2 * 2 * 128 * BYTES
    assert moved.loaded <= 1.03 * (seen + of_queries)
    assert moved.written == moved.stored == of_queries
