from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from app.config import ModelConfig
from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import SamplingParams
from app.model.cpu.decoder import NativeDecoder, buffer_bytes
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import ThreadPool, is_fast
from app.model.cpu.weights import why_not_native
from app.model.inputs import build_inputs
from app.model.loader import load_model
from app.model.ways import native_decoder
from app.model.ways.loaded_model import LoadedModel
from app.model.ways.native_decoder import NativeModel
from app.model.ways.transformers_code import TransformersModel
from tests.model.test_attention import poison
from tests.tiny_models import VOCAB_SIZE, build_tiny_model

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
PROMPT = [(7 * at * at + 3) % VOCAB_SIZE for at in range(70)]
BLOCKS = [3, 8, 1, 0, 9]


def load(path: Path, dtype: str, *, quantization: str = "none") -> LoadedModel:
    if not is_fast(DTYPES[dtype]):
        pytest.skip(f"this CPU has no vector instructions for {dtype}, or there is no C++ compiler")
    config = ModelConfig(path=str(path), device="cpu", dtype=dtype, quantization=quantization)  # type: ignore[arg-type]
    return load_model(config, str(path))


def decoder_of(model: LoadedModel, *, num_threads: int = 2, in_int8: bool = False) -> NativeDecoder:
    """in_int8: its KV memory."""
    assert isinstance(model, NativeModel)
    pages = NativeKVCache(model.layers, num_blocks=32, block_size=16, dtype=model.dtype, in_int8=in_int8)
    poison(pages)
    return NativeDecoder(model.weights, pages, ThreadPool(num_threads))


def chunk(
    token_ids: list[int], start: int, size: int, block_ids: list[int], *, samples: bool = True
) -> ScheduledSequence:
    return ScheduledSequence(
        request_id="r", token_ids=tuple(token_ids[start : start + size]), start=start, block_ids=block_ids,
        samples=samples, sampling=SamplingParams(max_tokens=1),
    )  # fmt: skip


def step(decoder: NativeDecoder, *items: ScheduledSequence) -> torch.Tensor:
    batch = StepBatch(items, ())
    inputs = build_inputs(batch, block_size=decoder.block_size, device=torch.device("cpu"))
    prediction = decoder.predict(batch, inputs)
    assert prediction.likeliest is not None
    assert torch.equal(prediction.likeliest, prediction.logits.argmax(dim=-1))
    return prediction.logits


class Allocated(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
        )
    )  # fmt: skip


def allocated_bytes() -> int:
    """What all C++ code of this process has allocated and not freed."""
    try:
        find = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        pytest.skip("this C library does not say what is allocated")
    find.restype = Allocated
    found = find()
    return int(found.uordblks + found.hblkhd)


@pytest.mark.parametrize("quantization", ["none", "int8"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@torch.inference_mode()
def test_its_buffers_take_what_is_predicted(architecture: str, quantization: str, tmp_path: Path) -> None:
    build_tiny_model(architecture, hidden_size=256, intermediate_size=512).save_pretrained(tmp_path)
    decoder = decoder_of(load(tmp_path, "float32", quantization=quantization))
    alone, others = chunk(PROMPT, 0, 64, BLOCKS), [chunk(PROMPT, 0, 64, BLOCKS, samples=False)] * 63
    step(decoder, alone)
    before = allocated_bytes()
    step(decoder, alone, *others)
    predicted = [buffer_bytes(decoder._weights, num_tokens=size, num_positions=64) for size in (64, 64 * 64)]
    assert allocated_bytes() - before == pytest.approx(predicted[1] - predicted[0], rel=0.05)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "qwen3_moe"])
@torch.inference_mode()
def test_logits_are_the_models_own(architecture: str, dtype: str, tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    check_logits(tiny_model_path(architecture), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@torch.inference_mode()
def test_rows_of_a_tied_embedding_are_read_from_the_head(dtype: str, tmp_path: Path) -> None:
    own = build_tiny_model("llama", tie_word_embeddings=True)
    own.save_pretrained(tmp_path)
    model = load(tmp_path, dtype)
    assert isinstance(model, NativeModel)
    assert model.weights.embedding is None
    embedding = own.get_input_embeddings().weight.detach().to(DTYPES[dtype]).contiguous()
    kept = dataclasses.replace(model, weights=dataclasses.replace(model.weights, embedding=embedding))
    every_token = list(range(VOCAB_SIZE))
    blocks = list(range(-(-VOCAB_SIZE // 16)))
    logits = [step(decoder_of(each), chunk(every_token, 0, VOCAB_SIZE, blocks)) for each in (model, kept)]
    assert torch.equal(*logits)


def check_logits(path: Path, dtype: str) -> None:
    own = AutoModelForCausalLM.from_pretrained(path, dtype=DTYPES[dtype], attn_implementation="eager").eval()
    expected = own(torch.tensor([PROMPT])).logits[0, -1].float()
    got = step(decoder_of(load(path, dtype)), chunk(PROMPT, 0, 70, [3, 8, 1, 0, 9]))[0]
    assert torch.allclose(got, expected, atol=1e-4 if dtype == "float32" else 0.06 * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "qwen3", "mistral", "mixtral", "qwen3_moe"])
@torch.inference_mode()
def test_a_sequences_logits_do_not_depend_on_what_shares_its_steps(
    architecture: str, dtype: str, tiny_model_path
) -> None:  # type: ignore[no-untyped-def]
    """Bit for bit: in one step alone, in chunks, token by token, beside others, on other threads."""
    check_same_bits_in_any_step(load(tiny_model_path(architecture), dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("architecture", ["llama", "mistral"])
@torch.inference_mode()
def test_with_keys_and_values_in_int8_logits_do_not_depend_on_it_either(
    architecture: str, dtype: str, tiny_model_path
) -> None:  # type: ignore[no-untyped-def]
    model = load(tiny_model_path(architecture), dtype)
    _, in_int8 = check_same_bits_in_any_step(model, in_int8=True)
    plain = step(decoder_of(model), chunk(PROMPT, 0, 70, BLOCKS))[0]
    assert 0 < float((in_int8 - plain).norm() / plain.norm()) < 0.1


def check_same_bits_in_any_step(model: LoadedModel, *, in_int8: bool = False) -> tuple[NativeDecoder, torch.Tensor]:
    """The last decoder, which has the prompt's first 70 tokens in BLOCKS, and the logits after them."""
    whole = step(decoder_of(model, in_int8=in_int8), chunk(PROMPT, 0, 70, BLOCKS))[0]

    single = decoder_of(model, num_threads=1, in_int8=in_int8)
    for at in range(70):
        last = step(single, chunk(PROMPT, at, 1, BLOCKS))[0]
    assert torch.equal(last, whole)

    crowded = decoder_of(model, num_threads=3, in_int8=in_int8)
    backwards = PROMPT[::-1]
    for start, size in ((0, 33), (33, 5), (38, 31), (69, 1)):
        beside = chunk(backwards, start, 1, [2, 7, 4, 5, 6])
        rows = step(crowded, beside, chunk(PROMPT, start, size, BLOCKS), chunk(backwards, 0, 40, [10, 11, 12]))
    assert torch.equal(rows[1], whole)
    return crowded, whole


def test_a_step_may_sample_nothing(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    decoder = decoder_of(load(tiny_model_path("llama"), "float32"))
    assert step(decoder, chunk(PROMPT, 0, 20, [0, 1], samples=False)).shape == (0, VOCAB_SIZE)


def test_time_is_counted_by_part(tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    decoder = decoder_of(load(tiny_model_path("llama"), "float32"))
    before = decoder.seconds()
    step(decoder, chunk(PROMPT, 0, 70, [3, 8, 1, 0, 9]))
    assert all(after > before[part] for part, after in decoder.seconds().items())


def test_models_it_does_not_know_run_on_transformers_code(tiny_model_path, caplog: pytest.LogCaptureFixture) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level("INFO")
    assert not isinstance(load(tiny_model_path("gemma2"), "float32"), NativeModel)
    assert "Gemma2ForCausalLM is none of" in caplog.text


def test_rotary_positions_that_follow_the_batch_are_left_to_transformers(tmp_path: Path, caplog) -> None:  # type: ignore[no-untyped-def]
    caplog.set_level("INFO")
    model = build_tiny_model("llama")
    model.config.rope_parameters = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model.save_pretrained(tmp_path)
    assert not isinstance(load(tmp_path, "float32"), NativeModel)
    assert "dynamic rotary positions" in caplog.text


def test_a_decoder_that_computes_something_else_is_not_used(tiny_model_path, monkeypatch, caplog) -> None:  # type: ignore[no-untyped-def]
    right = native_decoder.settings_of
    monkeypatch.setattr(
        native_decoder,
        "settings_of",
        lambda *given: dataclasses.replace(right(*given), scaling=1.3 * right(*given).scaling),
    )
    model = load(tiny_model_path("llama"), "float32")
    assert not isinstance(model, NativeModel)
    assert "the first layer's output differs by" in caplog.text
    assert isinstance(model, TransformersModel)
    assert model.module.get_input_embeddings().weight.numel() > 0, "its weights are still there"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_experts", "per_token"), [(4, 1), (20, 3), (20, 20), (130, 2)])
@torch.inference_mode()
def test_of_experts_with_equal_scores_those_of_torch_are_chosen(
    num_experts: int, per_token: int, dtype: str, tmp_path: Path
) -> None:
    """All scores are equal, so the chosen experts, the same for all tokens, are those that `topk` happens to return."""
    model = build_tiny_model("qwen3_moe", num_experts=num_experts, num_experts_per_tok=per_token)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            weight.zero_()
    model.save_pretrained(tmp_path)
    check_logits(tmp_path, dtype)


@pytest.mark.parametrize(
    "settings",
    [{"norm_topk_prob": False}, {"decoder_sparse_step": 2, "mlp_only_layers": []}, {"num_experts": 0}],
    ids=str,
)
@torch.inference_mode()
def test_other_mixtures_have_the_models_logits(settings: dict[str, object], tmp_path: Path) -> None:
    build_tiny_model("qwen3_moe", **settings).save_pretrained(tmp_path)
    check_logits(tmp_path, "float32")


@pytest.mark.parametrize("architecture", ["mixtral", "qwen3_moe"])
@torch.inference_mode()
def test_a_token_without_a_number_does_not_disturb_the_experts_of_others(architecture: str, tiny_model_path) -> None:  # type: ignore[no-untyped-def]
    model = load(tiny_model_path(architecture), "float32")
    assert isinstance(model, NativeModel)
    expected = step(decoder_of(model), chunk(PROMPT, 0, 20, [0, 1]))
    poisoned = model.weights.embedding.clone()
    poisoned[205] = float("nan")
    batch = StepBatch((chunk([205] * 5, 0, 5, [4]), chunk(PROMPT, 0, 20, [0, 1])), ())
    decoder = decoder_of(dataclasses.replace(model, weights=dataclasses.replace(model.weights, embedding=poisoned)))
    inputs = build_inputs(batch, block_size=decoder.block_size, device=torch.device("cpu"))
    logits = decoder.predict(batch, inputs).logits
    assert logits[0].isnan().all()
    assert torch.equal(logits[1:], expected)


def test_a_shared_expert_is_left_to_transformers_code() -> None:
    assert why_not_native(build_tiny_model("qwen2_moe")) == "the C++ decoder has no shared expert"
