"""Performs a bulk run: Ray Data reads the input, and an `EnginePool` computes the items."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Generator
from contextlib import aclosing, closing

import ray

from app.config import ReplicasConfig, ServedModelConfig
from app.errors import InvalidSetup
from app.jobs.input_files import InputRows
from app.jobs.items import RowSettings
from app.jobs.job import InvalidItem
from app.jobs.outputs import RecordFormat
from app.jobs.run_folder import RunFolder, Summary, finish_run
from app.jobs.runner import JobRun, ReadingBroke, RunProgress, read_in_thread
from app.model.location import resolve_model_path
from deployments.bulk.engine_worker import PreparedItem
from deployments.bulk.pipeline import Preparation, prepared_items
from deployments.bulk.pool import EnginePool, reason
from deployments.launcher.own_cluster import start_own_cluster


def run_on_pool(found: InputRows, folder: RunFolder, rows: RowSettings, served: ServedModelConfig) -> Summary:
    """Answer every row, write the output, and return the summary.

    Raises:
        InvalidSetup: the model cannot be loaded, or the cluster has too few GPUs.
        Failure: the output cannot be written, or engines or readers fail repeatedly.
    """
    run = JobRun[PreparedItem](folder.results, RecordFormat().invalid, progress=RunProgress(found.num_rows))

    def compute() -> None:
        _join_or_start_ray(served.replicas)
        try:
            asyncio.run(_run(run, found, folder, rows, served))
        finally:
            ray.shutdown()

    return finish_run(folder, run, compute)


async def _run(
    run: JobRun[PreparedItem], found: InputRows, folder: RunFolder, rows: RowSettings, served: ServedModelConfig
) -> None:
    pool = EnginePool(served, run, folder.results.partial)

    async def source() -> AsyncGenerator[list[PreparedItem | InvalidItem], None]:
        how = Preparation(
            served=served,
            tokenizer_path=resolve_model_path(served.engine.model.path),
            model_info=await pool.model_info(),
            rows=rows,
        )
        read = read_in_thread(_until_it_breaks(prepared_items(found, folder.results.ended, how)))
        async with aclosing(read) as pieces:
            async for piece in pieces:
                yield piece

    await run.run(pool, source)


def _until_it_breaks(
    pieces: Generator[list[PreparedItem | InvalidItem], None, None],
) -> Generator[list[PreparedItem | InvalidItem], None, None]:
    has_begun = False
    try:
        with closing(pieces):
            for piece in pieces:
                has_begun = True
                yield piece
    except ray.exceptions.RayError as error:
        # Once rows were prepared, the settings are valid, and the cause may be temporary.
        if isinstance(error, InvalidSetup) and not has_begun:  # Ray makes its errors instances of their causes
            raise InvalidSetup(str(getattr(error, "cause", error))) from error
        raise ReadingBroke(reason(error)) from error


def _join_or_start_ray(replicas: ReplicasConfig) -> None:
    """Connect to the cluster in RAY_ADDRESS (set in Ray jobs), or start one. Raises InvalidSetup for too few GPUs."""
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False, logging_level="ERROR")
    else:
        start_own_cluster(reserved_cpus=replicas.num_replicas * replicas.reserved_cpus, include_dashboard=False)
    found = ray.cluster_resources().get("GPU", 0)
    if found < replicas.reserved_gpus:
        raise InvalidSetup(
            f"an engine needs {replicas.reserved_gpus:g} GPUs, but the cluster has {found:g}; lower replicas.num_gpus "
            f"or replicas.tensor_parallel"
        )
