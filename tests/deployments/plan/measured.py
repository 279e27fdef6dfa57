"""A measured replica and traces for tests: a step takes 10 ms and 0.1 ms for each token."""

from __future__ import annotations

from app.engine.request import ModelInfo
from deployments.plan.step_cost import MeasuredReplica, StepCost
from deployments.plan.traces import Trace, TracedRequest

EOS = 1


def step_cost(step_s: float = 0.010, token_s: float = 0.0001) -> StepCost:
    return StepCost.linear(step_s, token_s)


def measured_replica(cost: StepCost | None = None, *, num_blocks: int = 1000) -> MeasuredReplica:
    return MeasuredReplica(
        model="none", num_threads=1, num_blocks=num_blocks, block_size=16,
        model_info=ModelInfo(max_model_len=2048, vocab_size=1000, eos_token_ids=(EOS,)), cost=cost or step_cost(),
    )  # fmt: skip


def trace_of(*requests: tuple[float, int, int]) -> Trace:
    """Of (arrival, prompt tokens, output tokens) of each request."""
    return Trace(
        "trace",
        tuple(
            TracedRequest(arrival_s=at, num_prompt_tokens=prompt, num_output_tokens=output, max_tokens=output)
            for at, prompt, output in requests
        ),
    )
