"""The mixture of experts against plain torch: on a GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from app.model.llama import ExpertSettings
from tests.kit.models import DEVICE

pytest.importorskip("triton", reason="comes with the dev extra and with a CUDA torch")

from app.model.cuda.experts import ExpertMixture


@dataclass(frozen=True)
class Shape:
    num_experts: int = 4
    per_token: int = 2
    size: int = 32
    inner: int = 48
    num_tokens: int = 5
    dtype: torch.dtype = torch.float32
    sums_to_one: bool = True

    def mixture(self, *tensors: torch.Tensor, batch_invariant: bool = False) -> torch.Tensor:
        """What the kernels make of `tensors()`, or torch's grouped product."""
        settings = ExpertSettings(
            num_experts=self.num_experts, per_token=self.per_token, intermediate_size=self.inner,
            weights_sum_to_one=self.sums_to_one, rounds_weights=not self.sums_to_one,
        )  # fmt: skip
        lengths = torch.zeros(len(tensors[-1]), dtype=torch.int32, device=DEVICE)
        return ExpertMixture(settings, DEVICE, batch_invariant=batch_invariant)(*tensors, lengths)

    def tensors(self) -> list[torch.Tensor]:
        """Tokens, router, gate_up, down."""
        torch.manual_seed(0)
        sizes = (
            (self.num_tokens, self.size), (self.num_experts, self.size), (self.num_experts, 2 * self.inner, self.size),
            (self.num_experts, self.size, self.inner),
        )  # fmt: skip
        return [(torch.randn(*each) * 0.3).to(DEVICE, self.dtype) for each in sizes]


def in_eighths(numbers: torch.Tensor) -> torch.Tensor:
    """So that scores are exact in any order of their sums: torch computes them here."""
    return (numbers * 8).round() / 8


def plainly(shape: Shape, x: torch.Tensor, router: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor) -> Any:
    """Each token alone, in float32."""
    shares, chosen = functional.linear(x, router).float().softmax(-1).topk(shape.per_token)
    if shape.sums_to_one:
        shares = shares / shares.sum(-1, keepdim=True)
    output = []
    for token, experts, parts in zip(x.float(), chosen, shares, strict=True):
        gate, up = (gate_up[experts].float() @ token).chunk(2, dim=-1)
        inner = functional.silu(gate) * up
        output.append((down[experts].float() @ inner[..., None])[..., 0] * parts[:, None])
    return torch.stack(output)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(),
        Shape(num_tokens=150),  # several tiles of an expert
        Shape(num_experts=20, per_token=3, size=40, inner=24, num_tokens=9, sums_to_one=False),
        Shape(num_experts=1, per_token=1, size=70, inner=130, num_tokens=1),
        Shape(num_experts=7, per_token=7, num_tokens=3),
        Shape(num_experts=130, per_token=8, num_tokens=140, size=16, inner=16),
        Shape(dtype=torch.bfloat16, size=64, inner=64, sums_to_one=False),
    ],
    ids=str,
)
def test_each_token_gets_the_outputs_of_its_experts(shape: Shape) -> None:
    tensors = shape.tensors()
    ours = shape.mixture(*tensors)
    assert ours.dtype is shape.dtype
    tolerance = 1e-4 if shape.dtype is torch.float32 else 0.03
    torch.testing.assert_close(ours.float(), plainly(shape, *tensors), atol=tolerance, rtol=tolerance)


GROUPED = Shape(num_tokens=130, dtype=torch.bfloat16, size=64, inner=48)


@pytest.mark.skipif(
    DEVICE.type == "cuda" and torch.cuda.get_device_capability() != (9, 0), reason="torch groups products on Hopper"
)
@pytest.mark.parametrize(
    ("shape", "batch_invariant", "num_grouped"),
    [
        (GROUPED, False, 2),
        (replace(GROUPED, sums_to_one=False, num_experts=3, per_token=3), False, 2),
        (GROUPED, True, 0),
        (replace(GROUPED, num_tokens=127), False, 0),  # 63.5 rows an expert
        (replace(GROUPED, inner=44), False, 0),  # no multiple of 16 bytes
        (replace(GROUPED, dtype=torch.float32), False, 0),
    ],
    ids=str,
)
def test_many_tokens_of_a_prompt_are_grouped_products(
    shape: Shape, batch_invariant: bool, num_grouped: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grouped, product = [], functional.grouped_mm

    def noting(*given: Any, **named: Any) -> torch.Tensor:
        grouped.append(given)
        return product(*given, **named)

    monkeypatch.setattr(functional, "grouped_mm", noting)
    tensors = shape.tensors()
    ours = shape.mixture(*tensors, batch_invariant=batch_invariant)
    assert len(grouped) == num_grouped
    assert ours.dtype is shape.dtype
    torch.testing.assert_close(ours.float(), plainly(shape, *tensors), atol=0.03, rtol=0.03)


def test_equal_scores_go_to_the_first_experts() -> None:
    shape = Shape(num_experts=6, per_token=2)
    x, router, gate_up, down = shape.tensors()
    x, router = in_eighths(x), in_eighths(router[:1]).repeat(6, 1)
    expected = plainly(Shape(num_experts=2, per_token=2), x, router[:2], gate_up[:2], down[:2])
    torch.testing.assert_close(shape.mixture(x, router, gate_up, down), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("equal_rows")
def test_a_token_depends_on_none_beside_it() -> None:
    shape = Shape(num_tokens=70)
    x, router, gate_up, down = shape.tensors()
    x, router = in_eighths(x), in_eighths(router)
    whole = shape.mixture(x, router, gate_up, down)
    for first, last in ((0, 1), (69, 70), (11, 30)):
        assert torch.equal(shape.mixture(x[first:last], router, gate_up, down), whole[first:last])


def test_a_token_that_is_not_a_number_leaves_the_others_as_they_are() -> None:
    shape = Shape(num_tokens=6)
    x, router, gate_up, down = shape.tensors()
    expected = shape.mixture(x, router, gate_up, down)
    x[1:3] = float("nan")
    found = shape.mixture(x, router, gate_up, down)
    assert found[1:3].isnan().all()
    torch.testing.assert_close(found[[0, 3, 4, 5]], expected[[0, 3, 4, 5]])


@pytest.mark.skipif(DEVICE.type == "cuda", reason="counted in Triton's interpreter")
def test_four_launches_and_only_the_weights_of_chosen_experts_are_read() -> None:
    from tests.model.cuda.counting import counting

    shape = Shape(num_experts=64, num_tokens=3)
    x, router, gate_up, down = shape.tensors()
    chosen = functional.linear(x, router).topk(shape.per_token).indices.unique()
    with counting() as counts:
        shape.mixture(x, router, gate_up, down)
    assert counts.num_launches == 4 + 1  # and the zeros, once for all layers
    assert not counts.waits
    for kernel, weight, inputs in (
        ("expert_gate_kernel", gate_up, x.nbytes),
        ("expert_down_kernel", down, shape.num_tokens * shape.per_token * shape.inner * 4),
    ):
        moved = counts.traffic(kernel)
        of_weights = weight[0].nbytes * len(chosen)
        assignments = shape.num_tokens * shape.per_token
        least = of_weights + inputs
        assert least <= moved.read <= least + (shape.num_experts + 2 * assignments) * 4
