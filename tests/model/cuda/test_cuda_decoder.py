"""The decoder for CUDA beside transformers' code: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from app.build import build_sync_engine
from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import Pooling
from app.model.allocated_bytes import num_bytes_of
from app.model.cuda import weights
from app.model.forward import Prediction, TransformersForward
from app.model.implementations.cuda_decoder import CudaModel
from app.model.implementations.loaded_model import LoadedModel
from app.model.implementations.transformers_code import TransformersModel
from tests.kit import models as kit
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import DEVICE, config_of, generate_plainly, relative_error, scheduled
from tests.model.transformers_code import transformers_code
from tests.tiny_models import build_tiny_model

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

import triton.language as tl

from app.model.cuda import sampler_kernels
from app.model.cuda.decoder import CudaDecoder
from app.model.cuda.fp8 import LEAST_CAPABILITY
from app.model.cuda.graph_runner import GraphModelRunner
from tests.model.cuda.test_graph_runner import attention_for

pytestmark = pytest.mark.usefixtures("triton_here")
ARCHITECTURES = ("llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe", "qwen2_moe")
PROMPTS = (tuple(range(3, 15)), (5, 6, 7), tuple(range(3, 9)))


@pytest.fixture(scope="module")
def small_path(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """architecture → folder with its tiny model, of which a mixture has few experts."""
    few = {"qwen3_moe": {"num_experts": 6, "num_hidden_layers": 2}, "qwen2_moe": {"num_experts": 4}}
    root = tmp_path_factory.mktemp("small")

    def path(architecture: str) -> Path:
        folder = root / architecture
        if not folder.exists():
            build_tiny_model(architecture, **few.get(architecture, {})).save_pretrained(folder)
        return folder

    return path


@pytest.mark.parametrize("architecture", ["mistral", "qwen2_moe"])
def test_tokens_are_those_of_generate_beside_others_in_pieces_and_after_preemption(
    architecture: str, tmp_path: Path
) -> None:
    """Of one layer: the logits of two are compared below."""
    path, changes = tmp_path, {"num_experts": 4, "layer_types": ["full_attention"]} if "moe" in architecture else {}
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    build_tiny_model(architecture, **small | changes).save_pretrained(path)
    scheduler = {"max_running": 3, "max_step_tokens": 24, "prefill_chunk_tokens": 9}
    cache = {"block_size": 4, "num_blocks": 7}
    engine = build_sync_engine(config_of(path, device="auto", dtype="float32", cache=cache, scheduler=scheduler))
    assert isinstance(engine.runner._forward, CudaDecoder)  # type: ignore[attr-defined]
    requests = [make_request(prompt, max_tokens=4, ignore_eos=True) for prompt in PROMPTS]
    assert run_to_end(engine, *requests).token_ids == generate_plainly(path, requests)
    assert engine.stats().total_preemptions > 0


def test_requests_compile_nothing_that_was_not_compiled_at_the_start(
    small_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the number of blocks is set, so that no step of the largest size is computed at the start."""
    compiled: set[tuple[object, ...]] = set()
    kernel_class = type(sampler_kernels.draw_kernel)
    run = kernel_class.run

    def noting(kernel: Any, *given: Any, **named: Any) -> Any:
        constants = {name for name, kind in kernel.fn.__annotations__.items() if kind is tl.constexpr}
        types = [each.dtype for each in given if isinstance(each, torch.Tensor)]
        compiled.add((kernel.fn.__name__, *types, *sorted((name, named[name]) for name in constants & named.keys())))
        return run(kernel, *given, **named)

    monkeypatch.setattr(kernel_class, "run", noting)
    settings = {"cache": {"block_size": 4, "num_blocks": 20}, "scheduler": {"max_running": 3, "max_step_tokens": 24}}
    speculation = {"method": "lookup"}
    engine = build_sync_engine(
        config_of(small_path("mistral"), device="auto", dtype="float32", speculation=speculation, **settings)
    )
    engine.prepare()
    at_start = set(compiled)
    wishes: tuple[dict[str, Any], ...] = (
        {"temperature": 1.0, "top_p": 0.5},
        {"logprobs": 2, "presence_penalty": 1.0},
        {},
    )
    requests = [
        make_request(prompt, max_tokens=2, ignore_eos=True, **wish)
        for prompt, wish in zip(PROMPTS, wishes, strict=True)
    ]
    run_to_end(engine, *requests)
    repeating = make_request(PROMPTS[0], max_tokens=7, ignore_eos=True, logit_bias=((30, 100.0),))
    run_to_end(engine, replace(repeating, prediction_token_ids=(30,) * 7))
    assert engine.stats().total_accepted_tokens > 0
    assert compiled == at_start
    assert {"draw_kernel", "logprobs_kernel"} <= {name for name, *_ in at_start}


def load_transformers(path: Path, **changes: Any) -> LoadedModel:
    with transformers_code():
        return load(path, **changes)


def load(path: Path, **changes: Any) -> LoadedModel:
    return kit.load(path, device="auto", **changes)


def runner_of(model: LoadedModel, *, batch_invariant: bool = False) -> GraphModelRunner:
    return GraphModelRunner(model, attention_for(model, batch_invariant=batch_invariant), max_rows=6, capture=None)


def piece(
    token_ids: tuple[int, ...], start: int, block_ids: list[int], pooling: Pooling | None = None
) -> ScheduledSequence:
    return scheduled(token_ids, start, block_ids, temperature=0.0, model_info={"pooling": pooling})


def predict(model: LoadedModel, *items: ScheduledSequence, before: tuple[ScheduledSequence, ...] = ()) -> Prediction:
    """Of a step with these, after a step with those before."""
    runner = runner_of(model)
    with torch.inference_mode():
        if before:
            runner._eagerly(StepBatch(before, ()))
        has_pooling = any(item.pooling is not None for item in items)
        return runner._eagerly(StepBatch(items, (), has_pooling=has_pooling))


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [*((each, "float32") for each in ARCHITECTURES), ("mistral", "bfloat16"), ("qwen2_moe", "bfloat16")],
)
def test_logits_and_hidden_states_are_those_of_transformers_code(
    architecture: str, dtype: str, small_path: Callable[[str], Path]
) -> None:
    path = small_path(architecture)
    before = (piece(tuple(range(3, 14)), 0, [3, 1, 4]), piece((5, 6), 0, [6]))
    items = (
        piece((14, 15), 11, [3, 1, 4, 5], Pooling.MEAN),
        piece((9,), 0, [2]),
        piece((7,), 2, [6], Pooling.LAST),
    )
    ours, right = (predict(each(path, dtype=dtype), *items, before=before) for each in (load, load_transformers))
    assert right.hidden is not None
    for mine, theirs in ((ours.logits, right.logits), (ours.hidden, right.hidden)):
        assert mine is not None
        assert mine.dtype is theirs.dtype
        assert mine.shape == theirs.shape
        assert relative_error(mine, theirs) < (1e-5 if dtype == "float32" else 0.06)


def test_the_torch_backend_keeps_transformers_code(tiny_model_path: Callable[[str], Path]) -> None:
    model = load(tiny_model_path("llama"), backend="torch")
    assert not isinstance(model, CudaModel)
    assert isinstance(runner_of(model)._forward, TransformersForward)


@pytest.mark.usefixtures("unverified")
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("qwen3_moe", {"norm_topk_prob": False}),
        # Two pieces, and a part of one; of the tiny model it is one and a part.
        ("qwen2_moe", {"norm_topk_prob": True, "shared_expert_intermediate_size": 96}),
        ("qwen2_moe", {"norm_topk_prob": False, "shared_expert_intermediate_size": 24}),
    ],
)
def test_shares_of_experts_and_shared_experts_are_those_of_transformers_code(
    architecture: str, changes: dict[str, object], tmp_path: Path
) -> None:
    build_tiny_model(architecture, **changes).save_pretrained(tmp_path)
    items = (piece(tuple(range(3, 9)), 0, [3, 1]), piece((9,), 0, [2]))
    model = load(tmp_path)
    assert isinstance(model, CudaModel)
    theirs = predict(load_transformers(tmp_path), *items).logits
    torch.testing.assert_close(predict(model, *items).logits, theirs, atol=1e-3, rtol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("gemma2", {}, "Gemma2ForCausalLM is not one of Llama"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "its MLP uses the activation gelu, not silu"),
    ],
)
def test_a_model_that_it_does_not_know_runs_on_transformers_code(
    architecture: str, changes: dict[str, object], reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_tiny_model(architecture, **changes).save_pretrained(tmp_path)
    with caplog.at_level(logging.INFO):
        assert not isinstance(load(tmp_path), CudaModel)
    assert [line for line in caplog.messages if "runs on transformers' code: " in line] == [
        line for line in caplog.messages if reason in line
    ]
    assert caplog.text.count(reason) == 1


def test_where_its_results_differ_the_weights_are_read_again_for_transformers_code(
    tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tiny_model_path("llama")
    items = (piece(tuple(range(3, 17)), 0, [3, 1, 4, 5]),)
    expected = predict(load_transformers(path), *items).logits
    gated = CudaDecoder._gated
    monkeypatch.setattr(CudaDecoder, "_gated", lambda decoder, *given: gated(decoder, *given) * 1.01)
    with caplog.at_level(logging.WARNING):
        model = load(path)
    assert "in the decoder for CUDA the first layer's output differs by" in caplog.text
    assert not isinstance(model, CudaModel)
    torch.testing.assert_close(predict(model, *items).logits, expected)


@pytest.mark.usefixtures("unverified")
def test_positions_that_follow_the_length_are_those_of_transformers_code(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rotary = {
        "rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0] * 8, "long_factor": [1.0, 3.0] * 4,
        "original_max_position_embeddings": 64, "factor": 4.0,
    }  # fmt: skip
    build_tiny_model("llama", rope_parameters=rotary).save_pretrained(tmp_path)
    items = (piece(tuple(range(3, 17)), 0, [3, 1, 4, 5]),)
    with caplog.at_level(logging.INFO):
        model = load(tmp_path)
    assert "positions for 256 tokens" in caplog.text
    assert isinstance(model, CudaModel)
    assert len(model.weights.rotary) == 256
    theirs = predict(load_transformers(tmp_path), *items).logits
    torch.testing.assert_close(predict(model, *items).logits, theirs, atol=1e-3, rtol=1e-4)


@pytest.mark.usefixtures("unverified")
def test_weights_are_there_once_and_no_more_than_a_layers_twice(
    tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model_path("qwen3")
    plain = load_transformers(path)
    assert isinstance(plain, TransformersModel)
    held, alive = weights._held, []
    released: list[bool] = []

    def found(module: PreTrainedModel, name: str) -> torch.Tensor | None:
        if name.endswith("gate_proj.weight"):
            released.append(all(each() is None for each in alive))
            alive.append(weakref.ref(module.get_parameter(name)))
        return held(module, name)

    monkeypatch.setattr(weights, "_held", found)
    model = load(path)
    assert released == [True] * len(model.layers)
    assert isinstance(model, CudaModel)
    parameters = num_bytes_of(plain.module.parameters())
    assert num_bytes_of(model.tensors()) == parameters + model.weights.rotary.nbytes


@pytest.mark.usefixtures("equal_rows", "rounded_fp8", "unverified")
@pytest.mark.parametrize(("architecture", "quantization"), [("qwen3", "none"), ("llama", "fp8")])
def test_batch_invariant_logits_are_the_same_in_every_bit_whatever_shares_the_step(
    architecture: str, quantization: str, tiny_model_path: Callable[[str], Path]
) -> None:
    if quantization == "fp8" and DEVICE.type == "cuda" and torch.cuda.get_device_capability() < LEAST_CAPABILITY:
        pytest.skip("this GPU has no products in FP8")
    dtype = "float32" if quantization == "none" else "bfloat16"
    model = load(tiny_model_path(architecture), dtype=dtype, quantization=quantization)
    tokens, beside = (5, 6, 7, 8, 9, 10), (11, 12, 13)
    alone, among = (runner_of(model, batch_invariant=True) for _ in range(2))

    @torch.inference_mode()
    def compute(runner: GraphModelRunner, *items: ScheduledSequence) -> torch.Tensor:
        return runner._eagerly(StepBatch(items, ())).logits

    first, second = compute(alone, piece(tokens, 0, [3, 1])), compute(alone, piece((14,), 6, [3, 1]))
    compute(among, piece(beside, 0, [0]), piece(tokens[:2], 0, [3, 1]))
    compute(among, piece(tokens[2:3], 2, [3, 1]), piece(beside, 0, [4]))
    assert torch.equal(compute(among, piece((9,), 0, [5]), piece(tokens[3:], 3, [3, 1]))[1], first[0])
    last = compute(among, piece((9,), 1, [5]), piece((9,), 0, [6]), piece((14,), 6, [3, 1]))
    assert torch.equal(last[2], second[0])
