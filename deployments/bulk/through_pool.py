"""A bulk run on engines of its own: Ray Data reads, the pool computes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator

import ray

from app.assembly import resolve_model_path
from app.config import ReplicasConfig
from app.errors import InvalidSetup
from app.jobs.input_files import Input
from app.jobs.preparation import PreparedRow, RowSettings
from app.jobs.progress import Summary
from app.jobs.record import Record
from app.jobs.results import OutputFolder
from app.jobs.runner import BulkJob, ReadingBroke
from deployments.bulk.options import PoolSettings
from deployments.bulk.pipeline import Preparation, prepared_rows
from deployments.bulk.pool import EnginePool
from deployments.launcher.own_cluster import num_cpus_for, start_own_cluster


def answer_rows(found: Input, folder: OutputFolder, rows: RowSettings, pool: PoolSettings) -> Summary:
    """Give every row its record and finish the folder.

    Raises:
        InvalidSetup: the model or the cluster cannot do it.
        Failure: the output cannot be written, engines or readers die again and again.
    """
    job = BulkJob[PreparedRow](folder)
    if len(folder.settled) < found.num_rows:
        _join_or_start_ray(pool.served.replicas)
        try:
            asyncio.run(_run(job, found, folder, rows, pool))
        finally:
            ray.shutdown()
    return job.finish()


async def _run(
    job: BulkJob[PreparedRow], found: Input, folder: OutputFolder, rows: RowSettings, settings: PoolSettings
) -> None:
    served, model = settings.served, settings.served.engine.model
    pool = EnginePool(served, job.backlog, job, continued=folder.under_way.continued)

    async def source() -> Generator[list[PreparedRow | Record], None, None]:
        how = Preparation(
            tokenizer_path=resolve_model_path(model.path),
            revision=model.revision,
            model_name=served.name,
            facts=await pool.facts(),
            rows=rows,
        )
        return _until_it_breaks(prepared_rows(found, folder.settled, how))

    await job.run(pool, source)


def _until_it_breaks(
    batches: Generator[list[PreparedRow | Record], None, None],
) -> Generator[list[PreparedRow | Record], None, None]:
    """The same batches; Ray's errors come as `ReadingBroke`."""
    try:
        yield from batches
    except ray.exceptions.RayError as error:
        raise ReadingBroke(str(error).strip().splitlines()[-1]) from error


def _join_or_start_ray(replicas: ReplicasConfig) -> None:
    """The cluster that RAY_ADDRESS names (as in a job), else one of our own. Raises InvalidSetup if it is too small."""
    if "RAY_ADDRESS" in os.environ:
        ray.init(log_to_driver=False, logging_level="ERROR")
    else:
        num_cpus = num_cpus_for(replicas.num_replicas * replicas.num_cpus)
        start_own_cluster(num_cpus=num_cpus, include_dashboard=False)
    found = ray.cluster_resources().get("GPU", 0)
    if found < replicas.num_gpus:
        raise InvalidSetup(
            f"an engine needs {replicas.num_gpus:g} GPUs and the cluster has {found:g}; see replicas.num_gpus"
        )
