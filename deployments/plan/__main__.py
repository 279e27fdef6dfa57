"""Plan a model's memory, or the settings and replicas for a trace, before starting a service. Does not use Ray.

`memory --model ID --gpu H200` (or `--cpu 16GiB`) only reads the model's config.json, not its weights.
`trace --trace FILE --slo ttft_p99=1s,itl_p99=100ms` measures steps on this machine, then simulates the trace.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import get_args

from app.config import EngineConfig, KvType, ServedModelConfig
from app.errors import CarouselError, InvalidSetup
from app.model.foreseen import check_hub_is_reachable
from deployments.cli import above_zero, positive
from deployments.launcher.trial import named_model
from deployments.plan.cards import card_of
from deployments.serve.settings import SERVE_YAML, read_serve_file
from deployments.threads import share_of_cores


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the plan and return 0. If the model does not fit or no plan is found, print the reason and return 1."""
    options = _parser().parse_args(arguments)
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        options.run(options)
    except CarouselError as error:
        print(error.message, file=sys.stderr)
        return 1
    return 0


def _memory(options: argparse.Namespace) -> None:
    card = None if options.gpu is None else card_of(options.gpu)
    if card is None and options.tensor_parallel > 1:
        raise InvalidSetup("--tensor-parallel is only supported for GPUs; omit it with --cpu")
    if card is not None and options.rank is not None:
        raise InvalidSetup("--rank is only supported for CPUs: a GPU always reserves memory for the highest rank")
    if card is not None and options.replicas > 1:
        raise InvalidSetup("--replicas is only supported for CPUs, where replicas share weights; see --num-gpus")
    if card is not None and options.draft_model is not None:
        raise InvalidSetup("--draft-model is only supported for CPUs: GPUs do not support speculation")
    models = [named_model(model) for model in (options.model, options.draft_model) if model is not None]
    for model in models:
        check_hub_is_reachable(model)
    # Imported late, because mistakes should be reported without waiting seconds for torch.
    from app.model.planned_memory import PlannedAdapters
    from deployments.plan.memory import CpuPlan, GpuPlan, config_of

    on_gpu = card is not None
    config = config_of(
        model={
            "path": models[0],
            "device": "cuda" if on_gpu else "cpu",
            "dtype": options.dtype or ("bfloat16" if on_gpu else None),
            "quantization": options.quantization,
            "max_model_len": options.context,
            "max_loaded_adapters": options.adapters if on_gpu else None,
        },
        cache={"gpu_memory_fraction": options.gpu_memory_fraction, "dtype": options.cache_dtype},
        scheduler={
            "max_running": options.max_running or (256 if on_gpu else None),
            "max_step_tokens": options.max_step_tokens or (8192 if on_gpu else None),
        },
        speculation={
            "method": None if options.draft_model is None else "draft_model",
            "model": None if options.draft_model is None else models[1],
        },
    )
    plan: CpuPlan | GpuPlan = (
        CpuPlan(
            config,
            options.cpu,
            PlannedAdapters(number=options.adapters or 0, rank=options.rank or 16),
            num_replicas=options.replicas,
        )
        if card is None
        else GpuPlan(config, card, share=options.num_gpus, num_ranks=options.tensor_parallel)
    )
    print(plan.table())
    plan.check()


def _trace(options: argparse.Namespace) -> None:
    from deployments.plan import report
    from deployments.plan.planner import Planner, ServiceLevel, limits_to_measure
    from deployments.plan.step_cost import MeasuredReplica, measure
    from deployments.plan.traces import read_trace

    if options.plot is not None and find_spec("matplotlib") is None:
        raise InvalidSetup("--plot requires matplotlib: pip install -c constraints.txt -e '.[plots]'")
    level = ServiceLevel.parse(options.slo)
    once = read_trace(options.trace).with_lengths(options.lengths)
    trace = once.repeated(options.requests or len(once.requests))
    trace = trace.at_rate(trace.rate * options.speed) if trace.seconds else trace
    model = _model_of(options.config, options.model)
    engine = _with_share_of_cores(model)
    if options.costs is not None and options.costs.is_file():
        measured = MeasuredReplica.read(options.costs)
    else:
        print(f"measuring steps of {engine.model.path} for {options.seconds:g} s", file=sys.stderr)
        measured = measure(engine, once, limits_to_measure(engine.scheduler), seconds=options.seconds)
        if options.costs is not None:
            measured.write(options.costs)
    if warning := report.warning_of_fit(measured.cost, seconds=options.seconds, costs=options.costs):
        print(f"{warning}\n")
    print(report.cost_in_words(measured.cost))
    once.check_lengths(measured.model_info.max_model_len)
    plan = Planner(trace, level, measured, engine.scheduler, engine.cache, dispatch=model.replicas.dispatch).plan()
    print(report.plan_in_words(plan, trace, level, cost_per_hour=options.cost_per_hour))
    report.write_config(options.config, model.name, plan, options.out)
    print(f"\nrun it: make serve CONFIG={options.out}")
    if options.plot is not None:
        report.draw(options.plot, plan, trace, level)


def _model_of(config: Path, name: str | None) -> ServedModelConfig:
    """Return the model to plan. Raises InvalidSetup if no model has this name, or for None if there are several."""
    models = [model for each in read_serve_file(config).applications.values() for model in each.models]
    found = [model for model in models if name in (None, model.name)]
    if len(found) != 1:
        names = ", ".join(model.name for model in models)
        problem = f"there is no model {name!r}" if name else f"it defines {len(models)} models; choose one with --model"
        raise InvalidSetup(f"{config}: {problem}; the models are {names}")
    return found[0]


def _with_share_of_cores(model: ServedModelConfig) -> EngineConfig:
    """Return the engine's settings with each replica's threads if `max_replicas` share this machine."""
    threads = model.engine.model.num_threads or share_of_cores([None] * model.replicas.max_replicas)
    return model.engine.with_setting("model.num_threads", threads)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="carousel plan", description=__doc__)
    plans = parser.add_subparsers(required=True, metavar="memory|trace")
    _add_memory(plans.add_parser("memory", help="show a model's weights and KV memory on a GPU or a CPU"))
    _add_trace(plans.add_parser("trace", help="find settings and replicas that meet an SLO on a trace"))
    return parser


def _add_trace(trace: argparse.ArgumentParser) -> None:
    trace.set_defaults(run=_trace)
    trace.add_argument(
        "--trace", required=True, metavar="FILE",
        help="a workload file, a step log, an access log, a CSV with Azure's columns, or azure-conv, azure-code",
    )  # fmt: skip
    trace.add_argument("--slo", required=True, metavar="TARGETS", help="for example ttft_p99=1s,itl_p99=100ms")
    trace.add_argument(
        "--config", type=Path, default=SERVE_YAML, metavar="FILE", help="default: deployments/serve.yaml"
    )
    trace.add_argument("--model", metavar="NAME", help="the model to plan, if the config defines several")
    trace.add_argument("--speed", type=above_zero, default=1.0, metavar="F", help="requests arrive F times as fast")
    trace.add_argument(
        "--lengths", type=above_zero, default=1.0, metavar="F", help="prompts and outputs are F times as long"
    )
    trace.add_argument("--requests", type=positive, metavar="N", help="shorten or repeat the trace to N requests")
    trace.add_argument(
        "--seconds", type=above_zero, default=60.0, metavar="S", help="time to measure steps, default: 60"
    )
    trace.add_argument(
        "--costs", type=Path, metavar="FILE", help="step times as JSON: read if the file exists, otherwise written"
    )
    trace.add_argument("--cost-per-hour", type=above_zero, metavar="C", help="price of a replica in any currency")
    trace.add_argument(
        "--out", type=Path, default=Path("planned.yaml"), metavar="FILE", help="new config; default: planned.yaml"
    )
    trace.add_argument("--plot", type=Path, metavar="FILE", help="draw latency and goodput by load (with matplotlib)")


def _add_memory(memory: argparse.ArgumentParser) -> None:
    memory.set_defaults(run=_memory)
    memory.add_argument("--model", required=True, help="a folder with a config.json, a GGUF file or a hub id")
    where = memory.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpu", help="a card's name, such as H200, or its memory, such as 80GiB")
    where.add_argument(
        "--cpu", nargs="?", const="", metavar="MEMORY",
        help="a machine's memory, such as 16GiB; default: the memory that is available on this machine",
    )  # fmt: skip
    memory.add_argument("--replicas", type=positive, default=1, help="replicas on a CPU, which share their weights")
    memory.add_argument("--context", type=positive, help="tokens of prompt and output; default: the model's limit")
    memory.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="default: bfloat16 on a GPU, and the best dtype on a CPU"
    )
    memory.add_argument(
        "--quantization", choices=("none", "int8", "int4", "fp8"), default="none", help="model.quantization"
    )
    memory.add_argument(
        "--cache-dtype", choices=get_args(KvType), default="auto", help="cache.dtype: int8 on a CPU, fp8 on a GPU"
    )
    memory.add_argument("--num-gpus", type=_share, default=1.0, help="replicas.num_gpus: 0.5 for two replicas per card")
    memory.add_argument("--tensor-parallel", type=positive, default=1, help="replicas.tensor_parallel: number of cards")
    memory.add_argument("--max-running", type=positive, help="scheduler.max_running (default: 256; CPU: 32)")
    memory.add_argument("--max-step-tokens", type=positive, help="scheduler.max_step_tokens (default: 8192; CPU: 512)")
    memory.add_argument("--adapters", type=positive, metavar="N", help="number of loaded LoRA adapters (default: 0)")
    memory.add_argument("--draft-model", metavar="MODEL", help="speculation.model, in addition to the model (CPU)")
    memory.add_argument("--rank", type=positive, metavar="N", help="rank of the adapters on a CPU (16; at most 64)")
    memory.add_argument("--gpu-memory-fraction", type=float, default=0.9, help="cache.gpu_memory_fraction")


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"got {text}; must be above 0 and at most 1, because a replica uses one GPU")
    return share


if __name__ == "__main__":
    sys.exit(main())
