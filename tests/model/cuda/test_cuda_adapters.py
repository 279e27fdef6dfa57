"""LoRA adapters in the decoder for CUDA: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from msgspec import structs
from transformers import PreTrainedModel

from app.build import build_sync_engine
from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.engine import Engine
from app.engine.largest_batch import largest_batch
from app.engine.request import Request
from app.errors import UnsupportedAdapter
from app.model.adapter_files import adapter_at
from app.model.adapters import MAX_RANK, read_adapter
from app.model.implementations.cuda_decoder import CudaModel
from app.model.implementations.loaded_model import LoadedModel
from app.model.verification import MAX_DIFFERENCES
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import DEVICE, config_of, generate_plainly, own_model, relative_error
from tests.lora import merge, save_adapter
from tests.tiny_models import build_tiny_model

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.adapters import AdapterSlots
from app.model.cuda.captured_inputs import CapturedInputs, StepSize, decode_size
from app.model.cuda.fp8 import in_fp8
from app.model.cuda.graph_capture import CudaCapture
from app.model.cuda.graph_runner import GraphModelRunner
from app.model.cuda.launching import kernels_of
from tests.model.cuda.counting import counting
from tests.model.cuda.test_cuda_decoder import load, piece, runner_of
from tests.model.cuda.test_graph_runner import RunAgain, RunsOutAt, attention_for

RANKS = {"first": 5, "second": 64, "third": 16}  # one that is odd, the largest, and a whole tile
NUM_SLOTS = 2
pytestmark = pytest.mark.usefixtures("triton_here")
TOKENS = tuple(range(3, 25))  # more than a tile of rows


def small_model(architecture: str = "llama") -> PreTrainedModel:
    """Triton's interpreter is slow."""
    return build_tiny_model(
        architecture, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1, layer_types=["full_attention"]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base, adapters, and the base with each of them merged in."""
    folder = tmp_path_factory.mktemp("adapters")
    small_model().save_pretrained(folder / "base")
    for name, rank in RANKS.items():
        save_adapter(folder / name, small_model(), rank=rank, seed=rank, size=0.1)
        merged = merge(small_model(), folder / name, 8 / rank)
        merged.save_pretrained(folder / f"merged-{name}")
    return folder


def load_adapting(path: Path, **changes: Any) -> tuple[LoadedModel, AdapterSlots]:
    model = load(path, max_loaded_adapters=NUM_SLOTS, **changes)
    assert model.adapters is not None
    return model, model.adapters


def under(adapter: object, item: ScheduledSequence) -> ScheduledSequence:
    return structs.replace(item, adapter=adapter)


def merged_logits(path: Path, tokens: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Of the last token, by transformers."""
    with torch.inference_mode():
        logits: torch.Tensor = own_model(path, dtype)(torch.tensor([tokens])).logits[0, -1]
    return logits.float()


def close(found: torch.Tensor, path: Path, tokens: tuple[int, ...]) -> None:
    torch.testing.assert_close(found, merged_logits(path, tokens), atol=1e-3, rtol=1e-4)


@torch.inference_mode()
def compute(runner: GraphModelRunner, *items: ScheduledSequence) -> torch.Tensor:
    """[num_sampled, vocab_size], on the host."""
    return runner._predict(StepBatch(items, ())).logits.float().cpu().clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_are_those_of_merged_weights_for_adapters_of_any_rank_and_the_base_in_one_step(
    dtype: str, folder: Path
) -> None:
    model, _ = load_adapting(folder / "base", dtype=dtype)
    runner = runner_of(model)
    first, second = (runner.load_adapter(folder / name) for name in ("first", "second"))
    shorter = TOKENS[:3]
    found = compute(
        runner,
        under(first, piece(TOKENS, 0, [0, 1, 2, 3, 4, 5])),
        under(second, piece(shorter, 0, [6])),
        piece(shorter, 0, [7]),
    )
    whole = ("merged-first", TOKENS), ("merged-second", shorter), ("base", shorter)
    for logits, (name, tokens) in zip(found, whole, strict=True):
        error = relative_error(logits, merged_logits(folder / name, tokens, model.dtype))
        assert error < (1e-5 if dtype == "float32" else 0.06)
    assert not torch.allclose(found[1], found[2], atol=0.5)


def test_biases_stay_and_of_layers_with_experts_attention_is_adapted(tmp_path: Path) -> None:
    small_model("qwen2_moe").save_pretrained(tmp_path / "base")
    targets = ("q_proj", "k_proj", "v_proj", "o_proj")
    save_adapter(tmp_path / "own", small_model("qwen2_moe"), targets=targets, size=0.1)
    merge(small_model("qwen2_moe"), tmp_path / "own", 8 / 4).save_pretrained(tmp_path / "merged")
    runner = runner_of(load_adapting(tmp_path / "base")[0])
    adapter = runner.load_adapter(tmp_path / "own")
    found = compute(runner, under(adapter, piece(TOKENS[:6], 0, [0, 1])))[0]
    close(found, tmp_path / "merged", TOKENS[:6])


@pytest.mark.usefixtures("equal_rows")
def test_a_sequences_logits_do_not_depend_on_the_adapters_beside_it(folder: Path) -> None:
    """Bit for bit: alone, in chunks, beside rows of another adapter and of none."""
    model, _ = load_adapting(folder / "base")
    alone, among = (runner_of(model, batch_invariant=True) for _ in range(2))
    first, second = (alone.load_adapter(folder / name) for name in ("first", "second"))
    blocks = [0, 1, 2, 3, 4, 5]
    expected = compute(alone, under(first, piece(TOKENS, 0, blocks)))[0]
    for start, size in ((0, 2), (2, 19), (21, 1)):
        item = piece(TOKENS[start : start + size], start, blocks)
        found = compute(among, under(second, piece((9,), 0, [6])), under(first, item), piece((9, 8), 0, [7]))
    assert torch.equal(found[1], expected)


def test_replayed_steps_are_eager_ones_whatever_is_in_the_slots(folder: Path) -> None:
    """The stand-in for a graph does its work again on the tensors that were there at its capture."""
    model, _ = load_adapting(folder / "base")
    capture = RunAgain()
    replaying = GraphModelRunner(model, attention_for(model), max_rows=3, max_tokens=10, capture=capture)
    eager = runner_of(model)
    replaying.prepare()
    first = replaying.load_adapter(folder / "first")
    second = replaying.load_adapter(folder / "second")
    steps = (
        (under(first, piece(TOKENS[:7], 0, [0, 1])), piece((9,), 0, [2]), under(second, piece((5, 6), 0, [3]))),
        (under(first, piece((11,), 7, [0, 1])), under(second, piece((5,), 2, [3])), piece((7,), 1, [2])),
        (under(second, piece((12,), 3, [3])),),
        (piece((7,), 2, [2]),),
    )
    for items in steps:
        num_replayed = len(capture.replayed)
        torch.testing.assert_close(compute(replaying, *items), compute(eager, *items), atol=1e-4, rtol=1e-4)
        assert len(capture.replayed) == num_replayed + 1

    replaying.unload_adapter(first)
    third = replaying.load_adapter(folder / "third")
    assert third == first, "its slot is taken again"
    found = compute(replaying, under(third, piece(TOKENS[:7], 0, [0, 1])))[0]
    close(found, folder / "merged-third", TOKENS[:7])


@pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
def test_a_graph_finds_what_is_written_to_a_slot_after_its_capture_and_no_launched_step_does(folder: Path) -> None:
    model, _ = load_adapting(folder / "base")
    runner = GraphModelRunner(
        model, attention_for(model), max_rows=3, max_tokens=10, capture=CudaCapture(model.device)
    )  # fmt: skip
    runner.prepare()
    for name in ("first", "third"):
        adapter = runner.load_adapter(folder / name)
        [logits] = compute(runner, under(adapter, piece(TOKENS[:7], 0, [0, 1])))
        runner.unload_adapter(adapter)
        runner.unload_adapter(runner.load_adapter(folder / "second"))
        close(logits, folder / f"merged-{name}", TOKENS[:7])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counted in Triton's interpreter")
def test_a_captured_step_with_adapters_waits_for_nothing_and_takes_two_launches_more_for_a_product(
    folder: Path,
) -> None:
    model, slots = load_adapting(folder / "base")
    for size in (decode_size(2), StepSize(8, 4, 2)):
        runner, found = runner_of(model), []
        for has_adapters in (False, True):
            with counting(computes=False) as counts:
                runner.compute_padding(replace(size, has_adapters=has_adapters))
            assert not counts.waits
            found.append(counts)
        without, adapted = found
        assert len(adapted.operators) - len(without.operators) == 0
        of_ours = [each.kernel for each in adapted.kernels if each.kernel in ("shrink_kernel", "expand_kernel")]
        assert of_ours == ["shrink_kernel", "expand_kernel"] * 4
        assert len(adapted.kernels) - len(without.kernels) == len(of_ours) == slots.num_kernels


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counted in Triton's interpreter")
def test_tiles_and_ranks_that_are_not_there_are_not_read(folder: Path) -> None:
    """Of a captured step: only the adapters in it cost what their matrices have."""
    model, slots = load_adapting(folder / "base")
    adapter = runner_of(model).load_adapter(folder / "first")
    inputs = CapturedInputs(replace(decode_size(4), has_adapters=True), attention_for(model), slots)
    x, output = torch.randn(4, 64), torch.zeros(4, 64)
    moved = []
    for items in (
        (piece((3,), 0, [0]), piece((4,), 0, [1])),
        (piece((3,), 0, [0]), under(adapter, piece((4,), 0, [1]))),
    ):
        inputs.fill(StepBatch(items, ()))
        assert inputs.adapted is not None
        with torch.inference_mode(), counting() as counts:
            inputs.adapted.add(0, "down", x, output)
        moved.append(counts)
    nothing, one = moved
    num_tiles = 4
    for kernel in ("shrink_kernel", "expand_kernel"):
        assert nothing.traffic(kernel).read <= num_tiles * 8
        assert nothing.traffic(kernel).written == 0
        matrix = RANKS["first"] * 64 * 4
        assert matrix < one.traffic(kernel).read < matrix + 64 * 4 + 16 * 4 + 200 + 64 * 4
    assert not output[0].any()
    assert output[1].any()


def test_where_memory_ends_during_capture_steps_with_adapters_run_eagerly(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, _ = load_adapting(folder / "base")
    runner = GraphModelRunner(model, attention_for(model), max_rows=4, capture=RunsOutAt(4))
    with caplog.at_level(logging.WARNING):
        runner.prepare()
    assert "steps of 2 tokens and fewer with adapters run without CUDA graphs" in caplog.text
    first = runner.load_adapter(folder / "first")
    found = compute(runner, under(first, piece(TOKENS[:1], 0, [0])))[0]
    close(found, folder / "merged-first", TOKENS[:1])


def test_a_lower_rank_in_a_slot_leaves_nothing_of_a_higher_one(folder: Path) -> None:
    model, slots = load_adapting(folder / "base")
    runner = runner_of(model)
    with torch.inference_mode():
        for each in slots.tensors():  # as memory may be that was never written
            each.fill_(0 if each.dtype is torch.int32 else float("nan"))
    runner.unload_adapter(runner.load_adapter(folder / "second"))
    first = runner.load_adapter(folder / "first")
    found = compute(runner, under(first, piece(TOKENS[:7], 0, [0, 1])))[0]
    close(found, folder / "merged-first", TOKENS[:7])


def test_an_adapter_that_is_refused_keeps_no_slot(folder: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "wide", small_model(), rank=MAX_RANK + 1)
    runner = runner_of(load_adapting(folder / "base")[0])
    for _ in range(NUM_SLOTS + 1):
        with pytest.raises(UnsupportedAdapter, match=f"rank {MAX_RANK + 1}; at most {MAX_RANK}"):
            runner.load_adapter(tmp_path / "wide")
    assert {runner.load_adapter(folder / name).slot for name in ("first", "second")} == {0, 1}


def test_an_adapter_that_is_loaded_in_sleep_is_there_afterwards(folder: Path) -> None:
    model, slots = load_adapting(folder / "base")
    runner = runner_of(model)
    first = runner.load_adapter(folder / "first")
    runner.sleep()
    assert {each.untyped_storage().nbytes() for each in slots.tensors()} == {0}
    second = runner.load_adapter(folder / "second")
    runner.wake()
    for adapter, name in ((first, "first"), (second, "second")):
        found = compute(runner, under(adapter, piece(TOKENS[:5], 0, [0, 1])))[0]
        close(found, folder / f"merged-{name}", TOKENS[:5])


def build(folder: Path, **model: Any) -> Engine:
    settings = {"device": "auto", "dtype": "float32"} | model
    scheduler = {"max_running": 3, "max_step_tokens": 12, "prefill_chunk_tokens": 7}
    cache = {"block_size": 4, "num_blocks": 14}
    return build_sync_engine(config_of(folder / "base", cache=cache, scheduler=scheduler, **settings))


def some_requests(folder: Path) -> dict[str, Request]:
    """By the folder of what is to generate the same. More adapters than there are slots."""
    made = {f"merged-{name}": adapter_at(name, str(folder / name)) for name in RANKS}
    return {
        name: replace(make_request((5, 6, 7), max_tokens=3, ignore_eos=True), adapter=adapter)
        for name, adapter in (made | {"base": None}).items()
    }


@pytest.mark.usefixtures("library_here")
@pytest.mark.parametrize("backend", ["graphs", "triton", "library", "torch", "no decoder"])
def test_an_engines_tokens_are_those_of_merged_weights_and_slots_are_used_again(
    folder: Path, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without our decoder, the code of transformers adds adapters in steps that are not captured."""
    if backend == "no decoder":
        monkeypatch.setattr(CudaModel, "why_not", staticmethod(lambda source, own: "it is not tried"))
        backend = "graphs"
    engine = build(folder, max_loaded_adapters=NUM_SLOTS, backend=backend)
    engine.prepare()
    requests = some_requests(folder)
    for names in (("base", "merged-first", "merged-second"), ("merged-third",), ("merged-first",)):
        wave = {name: replace(requests[name], request_id=f"{names}-{name}") for name in names}
        outcome = run_to_end(engine, *wave.values())
        for name, request in wave.items():
            [expected] = generate_plainly(folder / name, [request]).values()
            assert outcome.token_ids[request.request_id] == expected, name
    assert engine.adapters is not None
    assert engine.adapters.stats().num_loads == 4
    assert len(engine.adapters.stats().loaded) == NUM_SLOTS
    taken = engine.measurements().backend
    assert taken is not None
    assert taken.name == backend


def adds_nothing(*arguments: Any, **_: Any) -> None:
    """In place of a kernel. What it should have written is zero: new memory may hold any number, also infinite ones."""
    low = arguments[6]
    if isinstance(low, torch.Tensor):
        low.zero_()


@pytest.mark.parametrize("changes", [{}, {"quantization": "fp8", "dtype": "bfloat16"}])
@pytest.mark.parametrize("kernel", ["shrink_kernel", "expand_kernel"])
def test_kernels_that_do_not_work_leave_adapters_to_the_code_of_transformers(
    folder: Path, kernel: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They raise, or add nothing."""
    for broken, reason in (
        (MagicMock(side_effect=RuntimeError("PassManager::run failed")), "RuntimeError: PassManager::run failed"),
        (adds_nothing, "the update of an adapter for query_key_value of layer 0 differs by"),
    ):
        with monkeypatch.context() as patch:
            launch = MagicMock(__getitem__=MagicMock(return_value=broken))
            patch.setattr(kernels_of("adapter_kernels", DEVICE), kernel, launch)
            engine = build(folder, max_loaded_adapters=NUM_SLOTS, **changes)
            taken = engine.measurements().backend
            assert taken is not None
            assert reason in str(taken.failed)
            assert isinstance(engine.runner, GraphModelRunner)
            assert engine.runner.adapting is not None


def test_without_memory_for_adapters_there_are_none(folder: Path) -> None:
    assert build(folder).adapters is None


def test_memory_of_adapters_without_slots_is_left_beside_keys_and_values(folder: Path) -> None:
    model = load(folder / "base", dtype="float32", backend="torch")
    linears = [each for each in small_model().model.layers.modules() if isinstance(each, torch.nn.Linear)]
    of_one = sum(each.in_features + each.out_features for each in linears) * MAX_RANK * 4
    of_token = max(each.in_features + 2 * each.out_features for each in linears) * 4
    for number in (None, 1, 3):
        config = config_of(folder / "base", backend="torch", max_loaded_adapters=number, scheduler={"max_running": 2})
        largest = largest_batch(config.scheduler, model.model_info, block_size=16)
        of_step = largest.num_tokens * of_token
        assert model.needs(config, largest).adapters == (0 if number is None else (number + 1) * of_one + of_step)


def test_an_adapter_that_is_loaded_in_sleep_waits_in_the_hosts_memory(folder: Path) -> None:
    engine = build(folder, max_loaded_adapters=NUM_SLOTS, backend="torch")
    requests = some_requests(folder)
    expected = run_to_end(engine, requests["merged-first"]).token_ids
    runner = engine.runner
    assert isinstance(runner, GraphModelRunner)
    engine.sleep()
    adapter = runner.load_adapter(folder / "first")
    engine.wake()
    assert runner.adapting is not None
    assert all(each.down.device == DEVICE for each in adapter.values())  # type: ignore[attr-defined]
    again = replace(requests["merged-first"], request_id="again")
    assert run_to_end(engine, again).token_ids["again"] == expected[requests["merged-first"].request_id]


@pytest.mark.usefixtures("rounded_fp8")
def test_weights_in_fp8_are_adapted(folder: Path, tmp_path: Path) -> None:
    save_adapter(tmp_path / "strong", small_model(), rank=16, size=0.3)
    merge(small_model(), tmp_path / "strong", 8 / 16).save_pretrained(tmp_path / "merged")
    model, _ = load_adapting(folder / "base", dtype="bfloat16", quantization="fp8")
    runner = runner_of(model)
    strong = runner.load_adapter(tmp_path / "strong")
    found, plain = compute(runner, under(strong, piece(TOKENS[:6], 0, [0, 1])), piece(TOKENS[:6], 0, [2, 3]))
    expected = merged_logits(tmp_path / "merged", TOKENS[:6], torch.bfloat16)
    assert relative_error(found, expected) < MAX_DIFFERENCES["fp8"][1] < relative_error(plain, expected)


@torch.inference_mode()
def test_inputs_in_fp8_are_read_with_their_scales(folder: Path) -> None:
    model, slots = load_adapting(folder / "base", dtype="bfloat16")
    weights = read_adapter(folder / "third", slots.sizes)
    rows = slots.rows(StepBatch((under(slots.load(weights), piece(TOKENS[:3], 0, [0])),), ()))
    torch.manual_seed(0)
    inputs = in_fp8(torch.randn(3, 64, device=model.device))
    output = torch.zeros(3, 64, dtype=torch.bfloat16, device=model.device)
    rows.add(0, "down", inputs, output)
    update = weights["model.layers.0.mlp.down_proj"]
    expected = (inputs.values.float() * inputs.scales).cpu() @ update.down.T @ update.up.T
    torch.testing.assert_close(output.float().cpu(), expected, atol=0.02 * float(expected.abs().max()), rtol=0.02)
