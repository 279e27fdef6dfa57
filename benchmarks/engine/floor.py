"""What a workload costs at least on this machine: operations over the measured matrix rate, bytes over the copy rate.

Only linear layers count; attention, norms and everything else are free here.

The two-phase floor: every prompt token passes the body at the best rate of any size of step, and output tokens come in
steps of 32, which is where most of a decoding engine's time goes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

from benchmarks.engine.linear_shapes import LinearLayers, LinearShape
from benchmarks.engine.run import Run
from benchmarks.harness.workload import Workload

DECODE_TOKENS = 32
STEP_SIZES = (DECODE_TOKENS, 128, 256, 512)
_COPY_BYTES = 256 * 2**20
_MIN_SAMPLES = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """All linear layers once, with this many tokens."""

    num_tokens: int
    body_s: float
    head_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """What this machine was seen to do with a model's linear layers."""

    steps: tuple[StepTime, ...]  # the first is of DECODE_TOKENS
    copy_bytes_per_s: float  # read and written bytes together
    layers: LinearLayers
    weight_bytes: int  # one pass over all of them
    value_bytes: int  # of one number

    @property
    def body_flops(self) -> float:
        """The best rate of any step, operations a second."""
        return max(2 * step.num_tokens * self.layers.num_body_weights / step.body_s for step in self.steps)

    @property
    def head_flops(self) -> float:
        return max(2 * step.num_tokens * self.layers.head.num_weights / step.head_s for step in self.steps)

    @property
    def decode_step_s(self) -> float:
        return self.steps[0].body_s + self.steps[0].head_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Floor:
    """Seconds that a workload takes at least, by three measures."""

    two_phase_s: float
    best_rate_s: float  # everything, output tokens too, at the best rate
    bytes_s: float | None  # weights once a step and each sequence's KV once a token; None: KV size not known


def measure_rates(layers: LinearLayers, *, dtype: torch.dtype, device: str, seconds: float) -> MachineRates:
    """Time each size of step for `seconds` or longer. On a CPU, the better of plain and packed by oneDNN."""
    body = [_weight(shape, dtype, device) for shape in layers.body]
    head = _weight(layers.head, dtype, device)
    steps = tuple(
        StepTime(
            num_tokens=size,
            body_s=_best_s(body, size, device, seconds),
            head_s=_best_s([head], size, device, seconds),
        )
        for size in STEP_SIZES
    )
    return MachineRates(
        steps=steps,
        copy_bytes_per_s=2 * _COPY_BYTES / _copy_s(device, seconds),
        layers=layers,
        weight_bytes=layers.num_weights * dtype.itemsize,
        value_bytes=dtype.itemsize,
    )


def floor_of(rates: MachineRates, workload: Workload, run: Run) -> Floor:
    """The floor of what was computed: prompt tokens found in the prefix cache are left out."""
    layers = rates.layers
    num_prompt = workload.num_prompt_tokens - (run.num_cached_prompt_tokens or 0)
    num_output = run.num_output_tokens
    prompt_s = 2 * layers.num_body_weights * num_prompt / rates.body_flops
    # The last token of a request is drawn but never passes the body.
    through_body = num_prompt + num_output - len(workload.requests)
    return Floor(
        two_phase_s=prompt_s + num_output / DECODE_TOKENS * rates.decode_step_s,
        best_rate_s=2 * layers.num_body_weights * through_body / rates.body_flops
        + 2 * layers.head.num_weights * num_output / rates.head_flops,
        bytes_s=_bytes_s(rates, workload, run),
    )


def _bytes_s(rates: MachineRates, workload: Workload, run: Run) -> float | None:
    values = rates.layers.kv_values_per_token
    if values is None or run.num_steps is None:
        return None
    num_read = sum(
        _tokens_attended(timed.num_prompt_tokens, len(run.timelines[timed.request.request_id].token_ids))
        for timed in workload.requests
    )
    return (run.num_steps * rates.weight_bytes + num_read * values * rates.value_bytes) / rates.copy_bytes_per_s


def _tokens_attended(num_prompt: int, num_output: int) -> int:
    """KV tokens read for one request when every step reads its own once: the prompt, then one more each time."""
    return sum(range(num_prompt, num_prompt + num_output))


def _weight(shape: LinearShape, dtype: torch.dtype, device: str) -> torch.Tensor:
    return torch.randn(shape.num_outputs, shape.num_inputs, device=device).mul_(0.02).to(dtype)


def _best_s(weights: Sequence[torch.Tensor], num_tokens: int, device: str, seconds: float) -> float:
    inputs = {
        size: torch.randn(num_tokens, size, device=device).to(weights[0].dtype)
        for size in {weight.shape[1] for weight in weights}
    }

    def plain() -> None:
        for weight in weights:
            functional.linear(inputs[weight.shape[1]], weight)

    packed = _packed(weights, inputs, num_tokens) if device == "cpu" else None
    return min(_median_s(run, device, seconds) for run in (plain, packed) if run is not None)


def _packed(
    weights: Sequence[torch.Tensor], inputs: dict[int, torch.Tensor], num_tokens: int
) -> Callable[[], None] | None:
    """The same products with weights in oneDNN's own order; None where torch was built without."""
    try:
        operator = torch.ops.mkldnn._linear_pointwise
        ordered = [
            (torch.ops.mkldnn._reorder_linear_weight(weight, num_tokens), inputs[weight.shape[1]]) for weight in weights
        ]
    except (AttributeError, RuntimeError):
        return None

    def run() -> None:
        for weight, rows in ordered:
            operator(rows, weight, None, "none", [], "")

    return run


def _copy_s(device: str, seconds: float) -> float:
    source = torch.ones(_COPY_BYTES // 4, device=device)
    target = torch.empty_like(source)
    return _median_s(lambda: target.copy_(source), device, seconds)


@torch.inference_mode()
def _median_s(run: Callable[[], object], device: str, seconds: float) -> float:
    synchronize = torch.cuda.synchronize if device == "cuda" else None
    for _ in range(2):
        run()
    samples: list[float] = []
    while sum(samples) < seconds or len(samples) < _MIN_SAMPLES:
        if synchronize is not None:
            synchronize()
        started = time.perf_counter()
        run()
        if synchronize is not None:
            synchronize()
        samples.append(time.perf_counter() - started)
    return statistics.median(samples)
