"""What fits where, before anything is started: `python -m deployments.plan memory --model ID --gpu H200`.

From a model's config.json alone; no weights are read. No Ray here.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from app.errors import CarouselError
from deployments.arguments import positive
from deployments.plan.cards import card_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table and returns 0; returns 1 and says why where the model does not fit or cannot be planned."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from deployments.plan.memory import GpuPlan, config_of  # torch takes seconds to import; mistakes are said before

    try:
        card = card_of(options.gpu)
        config = config_of(
            options.model,
            context=options.context,
            dtype=options.dtype,
            max_running=options.max_running,
            max_step_tokens=options.max_step_tokens,
            gpu_memory_fraction=options.gpu_memory_fraction,
        )
        plan = GpuPlan(config, card, share=options.num_gpus)
        print(plan.table())
        plan.check()
    except CarouselError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deployments.plan", description=__doc__)
    memory = parser.add_subparsers(required=True, metavar="memory").add_parser(
        "memory", help="weights, KV memory, graphs and workspaces of a model on a GPU"
    )
    memory.add_argument("--model", required=True, help="a folder with a config.json, a GGUF file, or a hub id")
    memory.add_argument("--gpu", required=True, help="a card by its name, such as H200, or its memory, such as 80GiB")
    memory.add_argument("--context", type=positive, help="tokens of prompt and output; default: the model's own")
    memory.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    memory.add_argument("--num-gpus", type=_share, default=1.0, help="replicas.num_gpus: 0.5 for two on a card")
    memory.add_argument("--max-running", type=positive, default=256, help="scheduler.max_running")
    memory.add_argument("--max-step-tokens", type=positive, default=8192, help="scheduler.max_step_tokens")
    memory.add_argument("--gpu-memory-fraction", type=float, default=0.9, help="cache.gpu_memory_fraction")
    return parser


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"got {text}; must be above 0 and at most 1: one replica uses one GPU")
    return share


if __name__ == "__main__":
    sys.exit(main())
