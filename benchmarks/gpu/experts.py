"""Compare the decoder's time for the experts of one layer with the time to read the chosen experts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import functional

from app.model.cuda.experts import ExpertMixture
from app.model.llama import ExpertSettings
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.graphs import captured
from benchmarks.gpu.rates import copy_rate

# By model: its experts, and its hidden size.
_ON_GPU = {
    "Qwen3-30B-A3B": (ExpertSettings(num_experts=128, per_token=8, intermediate_size=768), 2048),
    "Mixtral-8x7B": (ExpertSettings(num_experts=8, per_token=2, intermediate_size=14336), 4096),
}
_STANDING_IN = {"tiny": (ExpertSettings(num_experts=4, per_token=2, intermediate_size=16), 32)}


@torch.inference_mode()
def measure(bench: Bench) -> None:
    rate = copy_rate(bench)
    for model in bench.parts("model", shapes := bench.sized(_ON_GPU, _STANDING_IN)):
        settings, hidden_size = shapes[model]
        torch.manual_seed(0)
        num_experts, inner = settings.num_experts, settings.intermediate_size
        sizes = ((num_experts, hidden_size), (num_experts, 2 * inner, hidden_size), (num_experts, hidden_size, inner))
        weights = [torch.randn(*size, dtype=torch.bfloat16, device=bench.device) * 0.02 for size in sizes]
        mixture = ExpertMixture(settings, bench.device)
        lengths = torch.empty(num_experts, dtype=torch.int32, device=bench.device)
        for num_tokens in bench.sized((1, 8, 64, 256, 2048), (1, 3)):
            x = torch.randn(num_tokens, hidden_size, dtype=torch.bfloat16, device=bench.device)
            num_chosen = torch.unique(functional.linear(x, weights[0]).topk(settings.per_token).indices).numel()
            layer_s = bench.seconds(captured(partial(_computed, mixture, x, weights, lengths), bench.device))
            of_expert = 3 * inner * hidden_size
            floor_s = num_chosen * of_expert * x.itemsize / rate
            operations = 2 * num_tokens * settings.per_token * of_expert
            bench.row(
                "experts of a layer", model=model, tokens=num_tokens, experts=num_chosen, us=round(layer_s * 1e6, 1),
                share_of_floor=round(floor_s / layer_s, 3), tflop_per_s=round(operations / layer_s / 1e12, 1),
            )  # fmt: skip


def _computed(
    mixture: ExpertMixture, x: torch.Tensor, weights: Sequence[torch.Tensor], lengths: torch.Tensor
) -> torch.Tensor:
    router, gate_up, down = weights
    return mixture(x, router, gate_up, down, lengths.zero_())
