"""From options to a loaded engine of ours, with room for the workload."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from app.assembly import build_sync_engine
from app.config import EngineConfig, ModelConfig
from app.engine.engine import Engine
from benchmarks.engine.kv_room import check_fit, with_room
from benchmarks.engine.report import Setup
from benchmarks.harness.command import tell
from benchmarks.harness.options import DTYPES, Options
from benchmarks.harness.settings import engine_config
from benchmarks.harness.workload import Workload, read_workload


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine, what it was built from and what it is to serve."""

    engine: Engine
    config: EngineConfig
    workload: Workload
    setup: Setup


def load_engine(options: Options) -> LoadedEngine:
    """Read the workload, then build the engine. Notes go to stderr.

    Raises:
        BenchmarkError: an option or the workload is wrong, or does not fit.
        CarouselError: the engine cannot be built; the message says why.
    """
    workload = read_workload(options.workload)
    config = configured(options)
    device = resolve_device(config.model.device)
    config = with_room(config, workload, options.assignments, device)
    tell(f"loading {config.model.path}")
    engine = build_sync_engine(config)
    shortage = check_fit(engine, config, workload)
    if shortage is not None:
        tell(f"note: {shortage}")
    setup = Setup(
        engine="carousel",
        model=config.model.path,
        workload=options.workload,
        dtype=dtype_name(config.model, device),
        threads=config.model.num_threads,
        device=device,
        settings=[f"{assignment.path}={assignment.value}" for assignment in options.assignments],
        kv_blocks=engine.stats().num_blocks,
        kv_block_size=config.cache.block_size,
    )
    return LoadedEngine(engine, config, workload, setup)


def resolve_device(asked: str | None) -> str:
    """cpu or cuda; cuda where there is one when nobody chose."""
    if asked in ("cpu", "cuda"):
        return asked
    return "cuda" if torch.cuda.is_available() else "cpu"


def dtype_name(model: ModelConfig, device: str) -> str:
    """fp32 or bf16, as the engine will hold the weights."""
    if model.dtype == "auto":
        return "bf16" if device == "cuda" else "fp32"
    return next((short for short, name in DTYPES.items() if name == model.dtype), model.dtype)


def configured(options: Options) -> EngineConfig:
    """The engine's settings as asked; `--set` comes last. Raises BenchmarkError when a value is refused."""
    given = {
        "model.path": options.model,
        "model.dtype": DTYPES[options.dtype] if options.dtype else None,
        "model.device": options.device,
        "model.num_threads": options.threads,
    }
    return engine_config({path: value for path, value in given.items() if value is not None}, options.assignments)
