"""Products in FP8: on a GPU where there is one, else torch's own on a CPU and Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch import nn

from app.config import ModelConfig
from app.errors import InvalidSetup
from app.model.allocated_bytes import num_bytes_of
from app.model.implementations import cuda_decoder
from app.model.implementations import transformers_code as own_code
from app.model.implementations.cuda_decoder import CudaModel
from app.model.implementations.loaded_model import LoadedModel
from app.model.implementations.transformers_code import TransformersModel
from app.model.planned_memory import planned_gpu_model
from tests.kit import models as kit
from tests.kit.engine import make_request, run_to_end
from tests.kit.models import DEVICE, config_of, relative_error
from tests.model.cpu_allocator import peak_of_cpu
from tests.model.test_quantised_checkpoint import FORMS, save_quantised
from tests.model.transformers_code import transformers_code
from tests.tiny_models import build_tiny_model

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.build import build_sync_engine
from app.model.cuda import fp8
from app.model.cuda.attention import TritonAttention
from app.model.cuda.decoder import CudaDecoder
from app.model.cuda.fp8 import FP8, LARGEST, Fp8Rows, empty_inputs, in_fp8, linear
from app.model.gpu_backends import BackendFailed
from tests.model.cuda.test_cuda_decoder import piece, predict
from tests.model.cuda.test_decoder_kernels import Shape, decoder_of

pytestmark = pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() < (8, 9), reason="this GPU has no products in FP8"
)


@pytest.fixture(autouse=True)
def _rounded(rounded_fp8: None) -> None: ...


IN_FP8 = {"device": "auto", "dtype": "bfloat16", "quantization": "fp8"}


def load(path: Path, **changes: object) -> LoadedModel:
    return kit.load(path, **IN_FP8 | changes)


def random(*size: int) -> torch.Tensor:
    return torch.randn(*size).to(DEVICE, torch.bfloat16)


def widened(rows: Fp8Rows) -> torch.Tensor:
    return rows.values.float() * rows.scales


def close_in_fp8(ours: Fp8Rows, right: torch.Tensor) -> None:
    """Within half a step of the type."""
    assert ours.values.dtype is FP8
    torch.testing.assert_close(ours.scales, right.float().abs().amax(1, keepdim=True) / LARGEST)
    error = (widened(ours) - right.float()).abs() / ours.scales
    assert (error <= torch.maximum(right.float().abs() / ours.scales / 16, torch.tensor(2.0**-10)) + 1e-4).all()


def test_the_largest_number_of_each_row_becomes_the_largest_of_the_type() -> None:
    torch.manual_seed(0)
    weight = random(1030, 48)  # more rows than are converted at once
    weight[3] = 0
    weight[4] *= 1e30
    rows = in_fp8(weight)
    assert (rows.values.float().abs().amax(1)[torch.arange(1030, device=DEVICE) != 3] == LARGEST).all()
    assert not widened(rows)[3].any()
    assert ((widened(rows) - weight).abs() <= weight.abs() / 16 + rows.scales * 2**-10).all()


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_is_that_of_the_rounded_numbers(*, has_bias: bool) -> None:
    torch.manual_seed(0)
    x, weight, bias = in_fp8(random(5, 64)), in_fp8(random(48, 64)), random(48) if has_bias else None
    right = widened(x) @ widened(weight).t() + (0 if bias is None else bias.float())
    found = linear(x, weight, bias)
    assert found.dtype is torch.bfloat16
    torch.testing.assert_close(found.float(), right, rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("size", [16, 48, 1040])
def test_kernels_write_rows_with_their_scales_and_each_as_it_does_alone(size: int) -> None:
    shape = Shape(dtype=torch.bfloat16)
    decoder = decoder_of(shape)
    x, addend, weight, gate_up = (random(*each) for each in ((3, size), (3, size), (size,), (3, 2 * size)))

    def written(rows: slice) -> tuple[Fp8Rows, ...]:
        def empty() -> Fp8Rows:
            found = empty_inputs(in_fp8(random(1, size)), len(x[rows]))
            assert isinstance(found, Fp8Rows)
            return found

        norm = decoder._add_norm(addend[rows], x[rows].clone(), weight, empty())
        made = decoder._as_inputs(x[rows], empty())
        assert isinstance(made, Fp8Rows)
        return norm, decoder._gated(gate_up[rows], empty()), made

    together, alone = written(slice(None)), written(slice(1, 2))
    norm = decoder._add_norm(addend, x.clone(), weight, torch.empty_like(x))
    for ours, own, right in zip(together, alone, (norm, decoder._gated(gate_up, x.clone()), x), strict=True):
        close_in_fp8(ours, right)
        assert torch.equal(ours.values[1:2].view(torch.uint8), own.values.view(torch.uint8))
        assert torch.equal(ours.scales[1:2], own.scales)


def rounded_model(path: Path) -> LoadedModel:
    """transformers' code with the layers' products as they are in FP8."""
    with transformers_code():
        model = load(path, quantization="none")
    assert isinstance(model, TransformersModel)
    for layer in model.module.model.layers:
        for linear_layer in (each for each in layer.modules() if isinstance(each, nn.Linear)):
            linear_layer.forward = (
                lambda x, own=linear_layer: linear(  # type: ignore[method-assign, misc]
                    in_fp8(x.flatten(0, -2)), in_fp8(own.weight), own.bias
                ).view(*x.shape[:-1], -1)
            )
    return model


@pytest.mark.usefixtures("triton_here", "unverified")
def test_a_model_computes_what_its_rounded_products_compute(tiny_model_path: Callable[[str], Path]) -> None:
    path = tiny_model_path("qwen2")
    items = (piece(tuple(range(3, 17)), 0, [3, 1, 4, 5]), piece((9,), 0, [2]))
    model = load(path)
    assert isinstance(model, CudaModel)
    assert all(isinstance(layer.down, Fp8Rows) for layer in model.weights.layers)
    ours, right = (predict(each, *items).logits for each in (model, rounded_model(path)))
    # A number that bfloat16 rounds otherwise may go to another one in FP8, so that the two are not closer.
    assert relative_error(ours, right) < 0.25


@pytest.mark.usefixtures("triton_here", "unverified")
def test_a_matrix_takes_half_the_memory_and_head_and_embedding_stay(tmp_path: Path) -> None:
    build_tiny_model("llama", hidden_size=256, intermediate_size=1024, tie_word_embeddings=False).save_pretrained(
        tmp_path
    )
    model, plain = load(tmp_path), load(tmp_path, quantization="none")
    planned = planned_gpu_model(config_of(tmp_path, **IN_FP8), dtype=torch.bfloat16)
    assert isinstance(model, CudaModel)
    assert model.weights.head.dtype is model.weights.embedding.dtype is torch.bfloat16
    sizes = [num_bytes_of(each.tensors()) for each in (model, planned, plain)]
    assert sizes[0] == sizes[1]
    assert isinstance(plain, CudaModel)
    of_matrices = num_bytes_of(
        matrix
        for layer in plain.weights.layers
        for matrix in (layer.query_key_value, layer.output, layer.gate_up, layer.down)
        if isinstance(matrix, torch.Tensor)
    )
    assert sizes[2] - of_matrices * 0.5 <= sizes[0] <= sizes[2] - of_matrices * 0.49


@pytest.mark.usefixtures("triton_here")
@pytest.mark.skipif(DEVICE.type == "cuda", reason="counted by a CPU's allocator")
def test_no_more_than_the_model_in_fp8_and_one_layer_in_bfloat16_is_on_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 5, "tie_word_embeddings": False}
    whole = build_tiny_model("llama", **sizes).to(torch.bfloat16)
    whole.save_pretrained(tmp_path)
    monkeypatch.setattr(fp8, "_ROWS_AT_ONCE", 16)
    monkeypatch.setattr(own_code, "read_module", None)
    peaks = {}

    def count(room: ModuleType, name: str) -> None:
        work = getattr(room, name)

        def counted(*given: Any, **named: Any) -> Any:
            found: list[Any] = []
            peaks[name] = peak_of_cpu(lambda: found.append(work(*given, **named)))
            return found[0]

        monkeypatch.setattr(room, name, counted)

    count(own_code, "_verified_reference")
    count(cuda_decoder, "fuse_weights")
    in_fp8_bytes = num_bytes_of(load(tmp_path, max_model_len=32).tensors())
    of_layer = num_bytes_of(whole.model.layers[0].parameters())
    assert peaks["_verified_reference"] < 1.3 * of_layer  # with the activations
    assert in_fp8_bytes < peaks["fuse_weights"] < in_fp8_bytes + of_layer


@pytest.mark.usefixtures("triton_here", "unverified")
@pytest.mark.parametrize("architecture", ["qwen2", "qwen2_moe"])
def test_weights_from_files_a_layer_at_a_time_are_those_of_the_whole_model(
    architecture: str, tiny_model_path: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tiny_model_path(architecture)
    with monkeypatch.context() as patch:
        patch.setattr(own_code, "read_module", None)
        model = load(path)
    for room in ("source", "implementations.transformers_code"):
        monkeypatch.setattr(f"app.model.{room}.mapped_model", lambda *_: None)
    whole = load(path)
    assert (model.model_info, model.layers) == (whole.model_info, whole.layers)
    assert all(equal_bits(*both) for both in zip(model.tensors(), whole.tensors(), strict=True))


def equal_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.equal(ours.cpu().view(torch.uint8), theirs.cpu().view(torch.uint8))


@pytest.mark.usefixtures("triton_here", "unverified")
@pytest.mark.parametrize("is_one_scale", [False, True])
def test_a_checkpoint_in_fp8_with_one_scale_a_row_is_taken_as_it_is(tmp_path: Path, *, is_one_scale: bool) -> None:
    quantization, dtype, suffix, by_row = FORMS[1]
    model = build_tiny_model("llama")
    path, _ = save_quantised(model, tmp_path, quantization, dtype=dtype, suffix=suffix, by_row=by_row)
    weights = load_file(path / "model.safetensors")
    if is_one_scale:
        weights |= {name: weights[name].max() for name in weights if name.endswith(suffix)}
        save_file(weights, path / "model.safetensors", {"format": "pt"})
    loaded = load(path)
    assert isinstance(loaded, CudaModel)
    first = loaded.weights.layers[0]
    attention = [f"self_attn.{each}_proj" for each in "qkv"]
    for ours, names in ((first.query_key_value, attention), (first.down, ["mlp.down_proj"])):
        assert isinstance(ours, Fp8Rows)
        stored = [weights[f"model.layers.0.{name}.weight"] for name in names]
        scales = [weights[f"model.layers.0.{name}.weight{suffix}"] for name in names]
        assert equal_bits(ours.values, torch.cat([each.view(torch.uint8) for each in stored]))
        rows = [scale.expand(len(each), 1) for scale, each in zip(scales, stored, strict=True)]
        assert torch.equal(ours.scales.cpu(), torch.cat(rows))


@pytest.mark.usefixtures("triton_here", "unverified")
@pytest.mark.parametrize("form", [0, 2])
def test_a_checkpoint_with_scales_of_blocks_or_in_int8_is_rounded_again(form: int, tmp_path: Path) -> None:
    quantization, dtype, suffix, by_row = FORMS[form]
    paths = save_quantised(build_tiny_model("llama"), tmp_path, quantization, dtype=dtype, suffix=suffix, by_row=by_row)
    ours, theirs = (load(path).tensors() for path in paths)  # those of the products of numbers and scales
    assert all(equal_bits(mine, their) for mine, their in zip(ours, theirs, strict=True))


@pytest.mark.usefixtures("triton_here")
def test_an_engine_generates(tiny_model_path: Callable[[str], Path]) -> None:
    scheduler, cache = {"max_running": 1, "max_step_tokens": 8}, {"block_size": 4, "num_blocks": 4}
    engine = build_sync_engine(config_of(tiny_model_path("llama"), cache=cache, scheduler=scheduler, **IN_FP8))
    request = make_request((5, 6, 7), max_tokens=2, ignore_eos=True)
    assert len(run_to_end(engine, request).token_ids[request.request_id]) == 2


@pytest.mark.usefixtures("triton_here")
class TestRefused:
    """At the start, with the reason and what to set."""

    def test_a_gpu_without_such_products(self, tiny_model_path: Callable[[str], Path], monkeypatch) -> None:  # type: ignore[no-untyped-def]
        for room in ("device", "loader"):
            monkeypatch.setattr(f"app.model.{room}.device_of", lambda config: torch.device("cuda"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
        reason = r"NVIDIA A100 has compute capability 8\.0, but FP8 needs 8\.9 or higher\. Set .* to none"
        with pytest.raises(InvalidSetup, match=f"only the decoder for CUDA supports; .*{reason}"):
            load(tiny_model_path("llama"))

    def test_a_cpu(self, tiny_model_path: Callable[[str], Path], monkeypatch) -> None:  # type: ignore[no-untyped-def]
        monkeypatch.setattr(TritonAttention, "fits", staticmethod(lambda device: False))
        with pytest.raises(InvalidSetup, match=r"it runs on cpu; a CPU supports model\.quantization: int8 and int4"):
            load(tiny_model_path("llama"))

    def test_another_architecture(self, tiny_model_path: Callable[[str], Path]) -> None:
        with pytest.raises(InvalidSetup, match="Gemma2ForCausalLM is not one of"):
            load(tiny_model_path("gemma2"))

    def test_sizes_that_do_not_fit(self, tmp_path: Path) -> None:
        build_tiny_model("llama", intermediate_size=72).save_pretrained(tmp_path)
        with pytest.raises(InvalidSetup, match="multiples of 16; its intermediate size is 72"):
            load(tmp_path)
        with pytest.raises(InvalidSetup, match="multiples of 16; its intermediate size is 72"):
            planned_gpu_model(config_of(tmp_path, **IN_FP8), dtype=torch.bfloat16)

    def test_other_results(self, tiny_model_path: Callable[[str], Path], monkeypatch) -> None:  # type: ignore[no-untyped-def]
        gated = CudaDecoder._gated
        monkeypatch.setattr(CudaDecoder, "_gated", lambda self, x, to: gated(self, x.flip(-1), to))
        with pytest.raises(BackendFailed, match="in the decoder for CUDA the first layer's output differs by"):
            load(tiny_model_path("llama"))

    @pytest.mark.parametrize("other", [{"device": "cpu"}, {"backend": "torch"}, {"dtype": "float32"}])
    def test_settings_that_contradict_it(self, other: dict[str, str]) -> None:
        name, value = next(iter(other.items()))
        with pytest.raises(ValidationError, match=f"only the decoder for CUDA supports, but {name} is {value}"):
            ModelConfig.model_validate({"quantization": "fp8"} | other)
