"""Bulk runs as jobs of the Ray cluster that this process belongs to, through its job server (Ray's dashboard)."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray.job_submission import JobStatus, JobSubmissionClient

from app.config import ApiConfig, ApplicationConfig, JobsConfig, ModelConfig
from app.errors import InvalidSetup
from app.jobs.job_server import INPUT, OUTPUT, JobState, NoJobServer
from deployments.serve.settings import BUILDER, read_serve_file

T = TypeVar("T")

_PROJECT = Path(__file__).resolve().parents[2]
_SERVE_FILE = "serve.json"
_STATES = {JobStatus.PENDING: JobState.RUNNING, JobStatus.RUNNING: JobState.RUNNING}  # any other is an end
_ON_DEMAND = ("working_dir", "py_modules", "pip", "uv", "conda", "image_uri")  # how the code came to this process


class RayJobs:
    """`JobServer` on Ray's. Its client blocks, so each call has a thread."""

    def __init__(self, client: JobSubmissionClient, config: ApplicationConfig, paths: Mapping[str, str]) -> None:
        """Not for callers: `connect` checks first. `paths` are resolved model paths by the models' names."""
        self._client = client
        self._config = config
        self._paths = paths

    @classmethod
    def connect(cls, config: ApplicationConfig, paths: Mapping[str, str]) -> RayJobs:
        """Find the cluster's job server. Raises InvalidSetup when there is none, or it is another cluster's."""
        assert config.batches is not None, "only batches run as jobs"
        return cls(_client(config.batches.jobs), config, paths)

    async def submit(self, job_id: str, *, model: str, folder: Path) -> None:
        """See `JobServer`."""
        if await self.state(job_id) is not JobState.UNKNOWN:
            return
        await asyncio.to_thread(self._write_serve_file, folder, model)
        command = [sys.executable, "-m", "deployments.bulk", "--through", "pool", "--resume"]
        command += ["--input", str(folder / INPUT), "--output", str(folder / OUTPUT)]
        command += ["--config", str(folder / _SERVE_FILE)]
        await self._ask(
            partial(
                self._client.submit_job,
                entrypoint=shlex.join(command),
                submission_id=job_id,
                runtime_env=_runtime_env(),
            )
        )

    async def state(self, job_id: str) -> JobState:
        """See `JobServer`."""
        try:
            status = await self._ask(partial(self._client.get_job_status, job_id))
        except _NotKnown:
            return JobState.UNKNOWN
        return _STATES.get(status, JobState.ENDED)

    async def stop(self, job_id: str) -> None:
        """See `JobServer`."""
        if await self.state(job_id) is JobState.RUNNING:
            await self._ask(partial(self._client.stop_job, job_id))

    async def log(self, job_id: str) -> str:
        """See `JobServer`."""
        try:
            return str(await self._ask(partial(self._client.get_job_logs, job_id)))
        except _NotKnown:
            return ""

    async def _ask(self, call: Callable[[], T]) -> T:
        """Raises NoJobServer, whatever Ray's client raises, and _NotKnown for a job that there is not."""
        asking = asyncio.create_task(asyncio.to_thread(call))
        try:
            return await asyncio.shield(asking)
        except asyncio.CancelledError:
            await asyncio.wait({asking})  # a thread goes on: who stops a job next must find what this one has begun
            raise
        except Exception as error:
            if "404" in str(error) and "does not exist" in str(error):
                raise _NotKnown from None
            raise NoJobServer(str(error)[:300]) from error

    def _write_serve_file(self, folder: Path, name: str) -> None:
        """What `--config` names: the model with its own settings and as many engines as a job has. JSON is YAML.

        Where the service has got another model since the job before, what that has written is dropped: a run has one
        model. Its records were booked before a job follows it.
        """
        config = self._config
        assert config.batches is not None, "only batches run as jobs"
        [served] = [model for model in config.models if model.name == name]
        engine = served.engine.model_copy(
            update={"model": served.engine.model.model_copy(update={"path": self._paths[name]})}
        )
        replicas = served.replicas.model_copy(update={"num_replicas": config.batches.jobs.engines, "autoscaling": None})
        alone = ApplicationConfig(
            models=(served.model_copy(update={"engine": engine, "replicas": replicas}),),
            # No keys: they are checked before lines come here, and the file is for every node to read.
            api=config.api.model_copy(update={"keys": ApiConfig().keys, "keys_file": None}),
        )
        path = folder / _SERVE_FILE
        if path.exists() and _model_in(path) != engine.model:
            shutil.rmtree(folder / OUTPUT, ignore_errors=True)
        application = {"name": "job", "import_path": BUILDER, "args": alone.model_dump(mode="json")}
        path.write_text(json.dumps({"applications": [application]}), encoding="utf-8")


class _NotKnown(Exception):
    pass


def _model_in(serve_file: Path) -> ModelConfig | None:
    """None for one that a crash has left torn, or that an earlier version has written."""
    try:
        [config] = read_serve_file(serve_file).applications.values()
    except InvalidSetup:
        return None
    return config.models[0].engine.model


def _client(config: JobsConfig) -> JobSubmissionClient:
    context = ray.get_runtime_context()
    try:
        client = JobSubmissionClient(config.server or context.gcs_address)
        there = client._do_request("GET", "/api/version").json().get("session_name")
    except Exception as error:
        raise InvalidSetup(
            f"batches.run_as: ray_job needs Ray's job server, and none answers for {config.server or 'this cluster'} "
            f"({str(error)[:200]}): start the cluster with its dashboard, name its URL in batches.jobs.server, or set "
            f"run_as to fleet"
        ) from error
    # Where a cluster has no dashboard Ray names the default port, on which that of another may listen.
    if there != context.get_session_name():
        raise InvalidSetup(
            f"batches.run_as: ray_job needs this cluster's job server; the one at {client.get_address()} is of another "
            f"cluster: start this one with its dashboard, name its URL in batches.jobs.server, or set run_as to fleet"
        )
    return client


def _runtime_env() -> dict[str, Any]:
    """The job finds our code as this process did."""
    own: dict[str, Any] = dict(ray.get_runtime_context().runtime_env)
    passed = {name: own[name] for name in _ON_DEMAND if own.get(name)}
    path = os.pathsep.join(filter(None, [str(_PROJECT), os.environ.get("PYTHONPATH")]))
    return passed | {"env_vars": {**own.get("env_vars", {}), "PYTHONPATH": path}}
