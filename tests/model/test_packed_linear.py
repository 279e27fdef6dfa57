from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from app.model.packed_linear import JoinedPart, PackedLinear, pack_linear_layers
from tests.tiny_models import ARCHITECTURES, build_tiny_model


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_packed_model_computes_what_it_did(architecture: str) -> None:
    model = build_tiny_model(architecture)
    token_ids = torch.arange(2, 40)[None]
    with torch.inference_mode():
        before = model(input_ids=token_ids).logits
        num_linears = sum(type(module) is nn.Linear for module in model.modules())
        assert pack_linear_layers(model) == num_linears
        after = model(input_ids=token_ids).logits
    assert torch.allclose(before, after, atol=1e-3)


def test_layers_that_read_the_same_input_are_joined() -> None:
    model = build_tiny_model("qwen2")
    pack_linear_layers(model)
    layer = model.model.layers[0]
    assert type(layer.self_attn.q_proj) is type(layer.self_attn.v_proj) is type(layer.mlp.up_proj) is JoinedPart
    assert type(layer.self_attn.o_proj) is type(layer.mlp.down_proj) is PackedLinear


@torch.inference_mode()
def test_code_that_reads_the_weights_of_a_packed_layer_finds_them() -> None:
    model = build_tiny_model("qwen2")
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    weights = {name: model.get_submodule(name).weight.clone() for name in names}
    pack_linear_layers(model)
    for name, weight in weights.items():
        assert torch.equal(model.get_submodule(name).weight, weight), name


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(16, size, bias=False) for size in (16, 8, 8))


@torch.inference_mode()
def test_joined_layers_give_each_input_its_own_output_whatever_the_order_of_calls() -> None:
    plain = Attention()
    packed = copy.deepcopy(plain)
    pack_linear_layers(packed)
    first, second = torch.randn(3, 16), torch.randn(3, 16)
    for name, x in [("k", first), ("q", first), ("q", second), ("v", first), ("v", second), ("v", second)]:
        expected, got = (getattr(model, f"{name}_proj")(x) for model in (plain, packed))
        assert torch.allclose(expected, got, atol=1e-5), name


@torch.inference_mode()
def test_layers_that_cannot_be_joined_are_packed_alone() -> None:
    module = Attention()
    module.k_proj = nn.Linear(24, 8)
    pack_linear_layers(module)
    assert type(module.q_proj) is type(module.k_proj) is PackedLinear


@torch.inference_mode()
def test_without_the_operators_for_its_type_a_model_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reorder = torch.ops.mkldnn._reorder_linear_weight

    def of_a_cpu_without_bfloat16(weight: torch.Tensor, hint: int) -> torch.Tensor:
        if weight.dtype is torch.bfloat16:
            raise RuntimeError("the bf16 path needs avx512bw")
        return reorder(weight, hint)

    monkeypatch.setattr("app.model.packed_linear.torch.ops.mkldnn._reorder_linear_weight", of_a_cpu_without_bfloat16)
    assert pack_linear_layers(Attention()) == 3
    module = Attention().to(torch.bfloat16)
    assert pack_linear_layers(module) == 0
    assert type(module.q_proj) is nn.Linear
    assert "no packed linear operators for torch.bfloat16 on this CPU" in caplog.text
