"""Checkpoints of AWQ, GPTQ and compressed-tensors: what they stand for is served, what does not fit is refused.

The writers here follow the definitions of the formats number by number: AutoAWQ's `WQLinear_GEMM.from_linear`,
GPTQModel's `pack_block`, `pack_to_int32` of compressed-tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from app.build import build_sync_engine
from app.config import ReplicasConfig
from app.errors import InvalidSetup, UnsupportedModel
from app.model.cpu.library import library
from app.model.implementations.native_decoder import NativeModel
from app.model.packed_numbers import ROWS_AT_ONCE, PackedWeight, Packing
from app.model.planned_memory import planned_cpu_memory, planned_gpu_model
from app.model.source import ModelSource
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import PROMPT, config_of, generate_plainly, load, load_native, logits_of
from tests.model.test_quantised_checkpoint import described
from tests.tiny_models import build_tiny_model

is_native = pytest.mark.skipif(library() is None, reason="there is no C++ compiler")


def of_compressed_tensors(**weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", **weights}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": group}}


FORMS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True},
    "gptq": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "checkpoint_format": "gptq"},
    "gptq with desc_act": {
        "quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": True, "checkpoint_format": "gptq_v2",
    },
    "gptq in 8 bits": {"quant_method": "gptq", "bits": 8, "group_size": -1, "desc_act": False},
    "compressed-tensors": of_compressed_tensors(num_bits=4, symmetric=False, strategy="group", group_size=32),
    "compressed-tensors by output": of_compressed_tensors(num_bits=8, symmetric=True, strategy="channel"),
}  # fmt: skip


def word(numbers: Sequence[int], bits: int) -> int:
    """An int32 of numbers, the first in the lowest bits."""
    together = sum(number << bits * at for at, number in enumerate(numbers))
    return together - (1 << 32) if together >= 1 << 31 else together


def words(matrix: Sequence[Sequence[int]], bits: int, order: Sequence[int] | None = None) -> torch.Tensor:
    """Several numbers of a row in each int32; its end is filled up with zeros."""
    order = range(32 // bits) if order is None else order
    filled = [[*row, *[0] * (-len(row) % len(order))] for row in matrix]
    return torch.tensor(
        [[word([row[at + own] for own in order], bits) for at in range(0, len(row), len(order))] for row in filled],
        dtype=torch.int32,
    )


def in_awq(numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """All three [outputs, inputs or groups]. The files have inputs first, and eight outputs in an int32."""
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    return {
        "qweight": words(numbers.T.tolist(), 4, order),
        "qzeros": words(zeros.T.tolist(), 4, order),
        "scales": scales.T.contiguous(),
    }


def in_gptq(
    numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor, *, bits: int, less: int
) -> dict[str, torch.Tensor]:
    """The files have inputs first; several inputs in an int32 of numbers, several outputs in one of zero points.

    less: than a zero point is the number in the file, 1 in the first version.
    """
    return {
        "qweight": words(numbers.tolist(), bits).T.contiguous(),
        "qzeros": words((zeros - less).T.tolist(), bits),
        "scales": scales.T.contiguous(),
        "g_idx": groups.to(torch.int32),
    }


def in_compressed_tensors(
    numbers: torch.Tensor, zeros: torch.Tensor | None, scales: torch.Tensor, *, bits: int
) -> dict[str, torch.Tensor]:
    """The files have outputs first. zeros: None where they are half of the range."""
    found = {
        "weight_packed": words(numbers.tolist(), bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(numbers.shape),
    }
    if zeros is not None:
        found["weight_zero_point"] = words(zeros.T.tolist(), bits).T.contiguous()
    return found


def plain(numbers: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """What they stand for, written as simply as can be."""
    return (numbers - zeros[:, groups]).float() * scales[:, groups].float()


def quantised(
    weight: torch.Tensor, bits: int, groups: torch.Tensor, *, is_symmetric: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Numbers, zero points and scales near a weight."""
    most, num_groups = (1 << bits) - 1, int(groups.max()) + 1
    numbers = torch.empty(weight.shape, dtype=torch.int64)
    zeros, scales = torch.empty(len(weight), num_groups, dtype=torch.int64), torch.empty(len(weight), num_groups)
    for group in range(num_groups):
        own = weight[:, groups == group]
        low, high = own.amin(1).clamp(max=0), own.amax(1).clamp(min=0)
        if is_symmetric:
            high = own.abs().amax(1)
            low = -high
        scales[:, group] = ((high - low) / most).half()
        zeros[:, group] = 1 << bits - 1 if is_symmetric else (-low / scales[:, group]).round().clamp(1, most)
        steps = own / scales[:, group, None] + zeros[:, group, None]
        numbers[:, groups == group] = steps.round().clamp(0, most).long()
    return numbers, zeros, scales.half()


def packed_as(form: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """What a checkpoint has in place of a weight, and the weight that it stands for."""
    described_by = FORMS[form]
    kind = described_by.get("config_groups", {}).get("group_0", {}).get("weights", described_by)
    bits, size = kind.get("bits", kind.get("num_bits")), kind.get("group_size", -1)
    groups = torch.arange(weight.shape[1]) // (weight.shape[1] if size == -1 else size)
    if kind.get("desc_act"):
        groups = groups[torch.randperm(len(groups))]
    is_symmetric = kind.get("symmetric", False)
    numbers, zeros, scales = quantised(weight, bits, groups, is_symmetric=is_symmetric)
    if form == "awq":
        parts = in_awq(numbers, zeros, scales)
    elif form.startswith("gptq"):
        less = 0 if kind.get("checkpoint_format") == "gptq_v2" else 1
        parts = in_gptq(numbers, zeros, scales, groups, bits=bits, less=less)
    else:
        parts = in_compressed_tensors(numbers, None if is_symmetric else zeros, scales, bits=bits)
    return parts, plain(numbers, zeros, scales, groups)


def save_packed(
    model: PreTrainedModel, folder: Path, form: str, *, kept: Sequence[str] = ("embed", "lm_head", "gate.weight")
) -> tuple[Path, Path]:
    """A packed checkpoint, and one of the weights that it stands for. kept: parts of names that stay as they are."""
    torch.manual_seed(0)
    packed, multiplied = folder / "packed", folder / "multiplied"
    model.save_pretrained(packed)
    model.save_pretrained(multiplied)
    numbers: dict[str, torch.Tensor] = {}
    products: dict[str, torch.Tensor] = {}
    for name, weight in load_file(packed / "model.safetensors").items():
        if weight.dim() != 2 or any(each in name for each in kept):
            numbers[name] = products[name] = weight
        else:
            parts, products[name] = packed_as(form, weight)
            numbers |= {name.removesuffix("weight") + part: tensor for part, tensor in parts.items()}
    save_file(numbers, packed / "model.safetensors", {"format": "pt"})
    save_file(products, multiplied / "model.safetensors", {"format": "pt"})
    return described(packed, FORMS[form]), multiplied


def weight_of(quantization: dict[str, Any], parts: dict[str, torch.Tensor]) -> PackedWeight:
    packing = Packing.of(quantization)
    assert packing is not None
    found = packing.weight("mlp.up_proj.weight", {f"mlp.up_proj.{part}": own for part, own in parts.items()}.get)
    assert found is not None
    return found


@st.composite
def packed_weights(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]:
    """A quantization_config, what the files have, and the weight."""
    method = draw(st.sampled_from(["awq", "gptq", "gptq_v2", "compressed-tensors"]))
    bits = 4 if method == "awq" else draw(st.sampled_from([2, 4, 8]))
    per_word, most = 32 // bits, (1 << bits) - 1
    num_outputs, num_inputs = (per_word * draw(st.integers(1, 5)) for _ in range(2))
    size = draw(st.sampled_from([-1, *(n for n in range(1, num_inputs + 1) if num_inputs % n == 0)]))
    groups = torch.arange(num_inputs) // (num_inputs if size == -1 else size)
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    num_groups = int(groups[-1]) + 1
    numbers = torch.randint(0, most + 1, (num_outputs, num_inputs), generator=random)
    zeros = torch.randint(int(method == "gptq"), most + 1, (num_outputs, num_groups), generator=random)
    scales = torch.randn(num_outputs, num_groups, generator=random).half()
    if method == "awq":
        quantization = {"quant_method": "awq", "bits": 4, "group_size": size, "version": "GEMM"}
        return quantization, in_awq(numbers, zeros, scales), plain(numbers, zeros, scales, groups)
    if method == "compressed-tensors":
        is_symmetric = draw(st.booleans())
        zeros = torch.full_like(zeros, 1 << bits - 1) if is_symmetric else zeros
        quantization = of_compressed_tensors(num_bits=bits, group_size=size, symmetric=is_symmetric)
        parts = in_compressed_tensors(numbers, None if is_symmetric else zeros, scales, bits=bits)
        return quantization, parts, plain(numbers, zeros, scales, groups)
    desc_act = draw(st.booleans())
    groups = groups[torch.randperm(num_inputs, generator=random)] if desc_act else groups
    quantization = {
        "quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": desc_act, "checkpoint_format": method,
    }  # fmt: skip
    parts = in_gptq(numbers, zeros, scales, groups, bits=bits, less=int(method == "gptq"))
    if not desc_act and draw(st.booleans()):
        del parts["g_idx"]
    return quantization, parts, plain(numbers, zeros, scales, groups)


@settings(max_examples=150, deadline=None)
@given(packed_weights())
def test_a_weight_is_what_its_numbers_stand_for(
    drawn: tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor],
) -> None:
    quantization, parts, expected = drawn
    weight = weight_of(quantization, parts)
    assert weight.shape == expected.shape
    assert torch.equal(weight.multiplied_out(torch.float32), expected)
    assert torch.equal(weight.multiplied_out(torch.bfloat16), expected.bfloat16())


@pytest.mark.parametrize("form", FORMS)
def test_a_weight_with_many_outputs_is_multiplied_out_in_pieces(form: str) -> None:
    torch.manual_seed(0)
    parts, expected = packed_as(form, torch.randn(2 * ROWS_AT_ONCE + 16, 32))
    assert torch.equal(weight_of(FORMS[form], parts).multiplied_out(torch.float32), expected)


def test_a_zero_point_of_0_in_gptqs_first_version_borrows_from_the_next_one() -> None:
    """GPTQModel subtracts 1 from all zero points of an int32 at once, so it is added so, too."""
    zeros = torch.tensor([[0], [5], [0], [0], [15], [1], [8], [0]])
    numbers, scales, groups = torch.full((8, 8), 9), torch.ones(8, 1).half(), torch.zeros(8, dtype=torch.long)
    parts = in_gptq(numbers, zeros, scales, groups, bits=4, less=0)
    parts["qzeros"] -= 0x11111111
    weight = weight_of(FORMS["gptq"] | {"group_size": -1}, parts)
    assert torch.equal(weight.multiplied_out(torch.float32), plain(numbers, zeros, scales, groups))


@is_native
@pytest.mark.parametrize(
    ("form", "architecture"),
    [
        *((form, "llama") for form in FORMS),
        ("awq", "qwen2"),
        ("gptq", "qwen3"),
        ("awq", "mixtral"),
        ("gptq", "mistral"),
    ],
)
def test_an_engine_gives_the_greedy_tokens_of_the_weights(form: str, architecture: str, tmp_path: Path) -> None:
    """The C++ decoder joins queries, keys and values, and the halves of the MLP."""
    packed, multiplied = save_packed(build_tiny_model(architecture), tmp_path, form)
    engine = build_sync_engine(config_of(packed, cache={"num_blocks": 64}, dtype="float32"))
    requests = [make_request(tuple(PROMPT[:size]), max_tokens=12, ignore_eos=True) for size in (3, 20, 41)]
    assert run_to_end(engine, *requests).token_ids == generate_plainly(multiplied, requests)


@is_native
@pytest.mark.parametrize("form", ["awq", "gptq in 8 bits", "compressed-tensors"])
@pytest.mark.parametrize(
    ("kept", "changes"),
    [
        (("embed", "lm_head"), {"tie_word_embeddings": True}),
        (("embed",), {"vocab_size": 224}),
        (("embed", "lm_head", "down_proj", "layers.1.self_attn.k_proj"), {}),
    ],
    ids=["tied", "packed output layer", "some layers as they are"],
)
@torch.inference_mode()
def test_whatever_is_packed_the_rest_is_read_as_it_is(
    form: str, kept: Sequence[str], changes: dict[str, Any], tmp_path: Path
) -> None:
    packed, multiplied = save_packed(build_tiny_model("llama", **changes), tmp_path, form, kept=kept)
    assert torch.equal(logits_of(load_native(packed)), logits_of(load_native(multiplied)))


@is_native
@torch.inference_mode()
def test_the_parts_of_a_weight_may_lie_in_two_files(tmp_path: Path) -> None:
    packed, multiplied = save_packed(build_tiny_model("llama"), tmp_path, "awq")
    whole = load_file(packed / "model.safetensors")
    (packed / "model.safetensors").unlink()
    for index, has in enumerate((True, False), 1):
        part = {name: tensor for name, tensor in whole.items() if ("qweight" in name) is has}
        save_file(part, packed / f"model-0000{index}-of-00002.safetensors", {"format": "pt"})
    assert torch.equal(logits_of(load_native(packed)), logits_of(load_native(multiplied)))


@is_native
@pytest.mark.parametrize("quantization", ["none", "int4", "int8"])
@torch.inference_mode()
def test_it_is_packed_again_shared_and_known_when_it_was_verified_before(
    quantization: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO")
    packed, multiplied = save_packed(build_tiny_model("llama"), tmp_path, "awq")
    checks, told = tmp_path / "checks", "awq in 4 bits, groups of 32 inputs, are multiplied out to torch.float32"
    first = load_native(packed, checks=checks, quantization=quantization)
    assert caplog.text.count(told) == 1
    again = load_native(packed, checks=checks, quantization=quantization)
    assert caplog.text.count(told) == 2
    assert ("set model.quantization: int4 to save memory and time" in caplog.text) is (quantization == "none")
    expected = logits_of(load_native(multiplied, quantization=quantization))
    assert torch.equal(logits_of(first), expected)
    assert torch.equal(logits_of(again), expected)
    monkeypatch.setattr(PackedWeight, "multiplied_out", None)  # sizes alone need no numbers
    config = config_of(packed, dtype="float32", quantization=quantization)
    source = ModelSource(
        config=config.model, location=str(packed), device=torch.device("meta"), dtype=torch.float32, cache=checks
    )
    planned = NativeModel.load_if_verified(source)
    assert planned is not None
    assert [each.shape for each in planned.tensors()] == [each.shape for each in first.tensors()]


def test_transformers_code_has_the_same_weights(tmp_path: Path) -> None:
    """As on a GPU."""
    packed, multiplied = save_packed(build_tiny_model("qwen2"), tmp_path, "gptq with desc_act")
    ours, theirs = (load(path, backend="torch").module for path in (packed, multiplied))
    assert ours is not None
    assert theirs is not None
    assert all(torch.equal(weight, ours.state_dict()[name]) for name, weight in theirs.state_dict().items())


@is_native
def test_it_is_planned_as_what_it_is_multiplied_out_to(tmp_path: Path) -> None:
    packed, multiplied = save_packed(build_tiny_model("llama"), tmp_path, "gptq")
    for quantization in ("none", "int4"):
        ours, theirs = (
            planned_cpu_memory(config_of(path, dtype="bfloat16", quantization=quantization))
            for path in (packed, multiplied)
        )
        assert ours == theirs
    assert planned_gpu_model(config_of(packed, device="auto"), dtype=torch.bfloat16).dtype is torch.bfloat16
    with pytest.raises(InvalidSetup, match=r"tensor_parallel: got 2; a quantised checkpoint cannot be split"):
        planned_gpu_model(config_of(packed, device="auto"), dtype=torch.bfloat16, num_ranks=2)


@is_native
def test_an_engine_that_has_slept_has_the_same_tokens(tmp_path: Path) -> None:
    packed, multiplied = save_packed(build_tiny_model("llama"), tmp_path, "compressed-tensors")
    config = config_of(packed, cache={"num_blocks": 64}, dtype="float32")
    engine = build_sync_engine(config, ReplicasConfig(sleep_after_s=1.0))
    request = make_request(tuple(PROMPT[:30]), max_tokens=12, ignore_eos=True)
    engine.sleep()
    engine.wake()
    assert run_to_end(engine, request).token_ids == generate_plainly(multiplied, [request])


def in_up_proj(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[dict[str, Any]], None]:
    """Change a tensor of a weight in the files; None: it is not there."""

    def apply(files: dict[str, torch.Tensor]) -> None:
        changed = change(files.pop(f"model.layers.0.mlp.up_proj.{name}"))
        if changed is not None:
            files[f"model.layers.0.mlp.up_proj.{name}"] = changed.contiguous()

    return apply


def queries_from_keys(files: dict[str, torch.Tensor]) -> None:
    for part in ("qweight", "qzeros", "scales", "g_idx"):
        files[f"model.layers.0.self_attn.q_proj.{part}"] = files[f"model.layers.0.self_attn.k_proj.{part}"].clone()


UP = r"model\.layers\.0\.mlp\.up_proj"


@pytest.mark.parametrize(
    ("form", "otherwise", "change", "reason"),
    [
        ("gptq", {}, in_up_proj("qzeros", lambda _: None), rf"{UP}\.qweight has no {UP}\.qzeros"),
        ("awq", {}, in_up_proj("scales", lambda _: None), rf"{UP}\.qweight has no {UP}\.scales"),
        ("gptq with desc_act", {}, in_up_proj("g_idx", lambda _: None), rf"has no {UP}\.g_idx"),
        ("gptq with desc_act", {}, in_up_proj("g_idx", lambda g: g + 1), r"g_idx has groups from 1 to 4; there are 4"),
        ("gptq with desc_act", {}, in_up_proj("g_idx", lambda g: g - 1), r"g_idx has groups from -1 to 2; there are 4"),
        ("gptq", {}, in_up_proj("g_idx", lambda g: g[:60]), r"g_idx is \[60\] in int32; it must be \[64\]"),
        ("awq", {}, in_up_proj("qweight", lambda w: w.long()), r"qweight is \[64, 8\] in int64; it must be a matrix"),
        ("awq", {}, in_up_proj("qweight", lambda w: w[:60]), r"60 inputs, which is not a multiple of the group size"),
        ("awq", {}, in_up_proj("qweight", lambda w: w[:0]), r"qweight is \[0, 8\] in int32; it must be a matrix"),
        ("awq", {}, in_up_proj("scales", lambda s: s[:, :56]),
         r"scales is \[2, 56\] in float16; it must be \[2, 64\] for 64 outputs of 64 inputs in 2 groups"),
        ("awq", {}, in_up_proj("qzeros", lambda z: z.half()), r"qzeros is \[2, 8\] in float16; it must be \[2, 8\]"),
        ("gptq", {"group_size": 48}, None, r"has 64 inputs, which is not a multiple of the group size 48"),
        ("gptq", {"group_size": 16}, None, r"scales is \[2, 64\] in float16; it must be \[4, 64\]"),
        ("gptq", {"bits": 8}, None, r"scales is \[2, 64\] in float16; it must be \[1, 64\] for 64 outputs of 32"),
        ("gptq", {}, queries_from_keys, r"q_proj.weight has the shape \[32, 64\], but the model expects \[64, 64\]"),
    ],
)  # fmt: skip
def test_files_that_do_not_fit_are_refused_with_the_numbers(
    form: str,
    otherwise: dict[str, Any],
    change: Callable[[dict[str, torch.Tensor]], None] | None,
    reason: str,
    tmp_path: Path,
) -> None:
    path, _ = save_packed(build_tiny_model("llama"), tmp_path, form)
    described(path, FORMS[form] | otherwise)
    if change is not None:
        files = load_file(path / "model.safetensors")
        change(files)
        save_file(files, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnsupportedModel, match=rf"do not fit its config\.json \({form[:4]}.*{reason}.*Download them"):
        load(path)


@pytest.mark.parametrize(
    ("quantization", "reason"),
    [
        (FORMS["awq"] | {"version": "gemv"}, "by awq, .*its version is gemv; only gemm can be read; .*gptqmodel"),
        (FORMS["awq"] | {"backend": "llm-awq"}, "its version is llm-awq; only gemm can be read"),
        (FORMS["awq"] | {"bits": 8}, "its bits is 8; only 4 can be read"),
        (FORMS["gptq"] | {"bits": 3}, "by gptq, .*its bits is 3; only 2 or 4 or 8 can be read; .*optimum"),
        (FORMS["gptq"] | {"checkpoint_format": "marlin"}, "its version is marlin; only gptq or gptq_v2 can be read"),
        (FORMS["gptq"] | {"group_size": 0}, "its group_size is 0; it must be a number of inputs, or -1 for all"),
        (of_compressed_tensors(num_bits=6), "its bits is 6; only 2 or 4 or 8 can be read"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "its config_groups describe 0 kinds"),
        (FORMS["compressed-tensors"] | {"transform_config": {"config_groups": {}}}, "it has a transform_config"),
    ],
)
def test_what_is_not_read_is_refused_by_name(
    quantization: dict[str, Any], reason: str, tiny_model_path: Callable[[str], Path], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((tiny_model_path("llama") / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=rf"{reason}.*unquantised checkpoint, with model\.quantization: int8"):
        load(described(tmp_path, quantization))
