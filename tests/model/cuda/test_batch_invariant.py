from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from app.errors import UnsupportedModel
from tests.kit.models import DEVICE, own_model

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.batch_invariant import BatchInvariantMode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_operators_compute_what_torch_computes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(*shape, device=DEVICE, dtype=dtype) for shape in ((2, 5, 70), (2, 70, 9)))
    linear = torch.nn.Linear(70, 66, device=DEVICE, dtype=dtype)

    def results() -> list[torch.Tensor]:
        return [
            linear(x), linear(x[0]), torch.nn.functional.linear(x, linear.weight), x[1] @ y[1], x @ y, torch.bmm(x, y),
            torch.einsum("bij,bjk->bik", x, y), x.pow(2).mean(-1, keepdim=True), x.mean(dim=2), x.softmax(-1),
            torch.nn.functional.rms_norm(x, (70,)),
        ]  # fmt: skip

    with torch.inference_mode():
        expected = results()
        with BatchInvariantMode():
            ours = results()
    for mine, right in zip(ours, expected, strict=True):
        assert mine.dtype is right.dtype
        torch.testing.assert_close(mine, right, atol=1e-5 if dtype is torch.float32 else 3e-2, rtol=2e-2)


@pytest.mark.usefixtures("equal_rows")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_how_many_there_are_or_where_it_stands(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(70, 40, device=DEVICE, dtype=dtype)
    linear = torch.nn.Linear(40, 24, device=DEVICE, dtype=dtype)
    with torch.inference_mode(), BatchInvariantMode():
        whole, means = linear(x), x.mean(-1)
        for first, last in ((0, 1), (69, 70), (3, 20)):
            assert torch.equal(linear(x[first:last]), whole[first:last])
            assert torch.equal(x[first:last].mean(-1), means[first:last])


def test_what_has_no_invariant_kernel_is_refused_by_name() -> None:
    x = torch.randn(2, 3, 3, device=DEVICE)
    with torch.inference_mode(), BatchInvariantMode():
        with pytest.raises(UnsupportedModel, match=r"uses aten\.baddbmm"):
            torch.baddbmm(x, x, x)
        with pytest.raises(UnsupportedModel, match=r"mean over dimensions \[0\]"):
            x.mean(0)


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "gemma2"])
def test_models_run_in_it_unmodified(architecture: str, tiny_model_path: Callable[[str], Path]) -> None:
    model = own_model(tiny_model_path(architecture)).to(DEVICE)  # type: ignore[arg-type]
    token_ids = torch.arange(3, 9, device=DEVICE)[None]
    with torch.inference_mode():
        expected = model(input_ids=token_ids, use_cache=False).logits
        with BatchInvariantMode():
            ours = model(input_ids=token_ids, use_cache=False).logits
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-3)
