"""Deploys a config file on this process's cluster, waits until the service is ready, and reports changes."""

from __future__ import annotations

import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import deployments.preload  # noqa: F401  # before Serve

# isort: split
import ray
import yaml
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus, DeploymentStatusOverview, ServeDeploySchema, ServeStatus

from app import progress
from app.errors import InvalidSetup
from app.model.location import has_chat_template
from deployments.chat import DEFAULT_URL
from deployments.launcher.checks import check_port
from deployments.launcher.terminal import StatusLines
from deployments.ray_internals import deploy
from deployments.serve.settings import ServeFile, read_serve_file, requested_threads
from deployments.threads import excess

READY = "ready"
SERVICE = "the HTTP service"


def roll_out(path: Path, lines: StatusLines) -> NoReturn:
    """Deploy the config, then report changes until a signal arrives. Raises InvalidSetup if an application fails."""
    config = read_serve_file(path)
    too_many = excess([each for application in config.applications.values() for each in requested_threads(application)])
    if too_many:
        _say(f"Warning: {too_many}")
    check_gpus(config)
    try:
        deploy(_schema(path, config))
    except RayError as error:
        if "already in use" in str(error).lower():
            check_port(config, path)  # raises if the port has come into use since the launcher checked it
        raise InvalidSetup(f"Serve's HTTP proxy did not start: {reason(str(error))}") from error
    _wait_until_ready(config, lines, Path(os.environ[progress.FOLDER]))
    _say(_welcome(config, lines.elapsed_s))
    _report_changes()


def _schema(path: Path, config: ServeFile) -> ServeDeploySchema:
    """Return the config for Serve. Without a host, the service listens on this machine only, unlike `serve run`."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    schema = ServeDeploySchema.model_validate({name: value for name, value in document.items() if value is not None})
    schema.http_options.host = config.host
    return schema


def check_gpus(config: ServeFile) -> None:
    """Raise InvalidSetup if the cluster has fewer GPUs than the replicas require in total."""
    served = [model.replicas for application in config.applications.values() for model in application.models]
    num_gpus = sum(replicas.max_replicas * replicas.reserved_gpus for replicas in served)
    found = ray.cluster_resources().get("GPU", 0)
    if found < num_gpus:
        raise InvalidSetup(
            f"the replicas need {num_gpus:g} GPUs, but this machine has "
            f"{found:g}; lower replicas.num_replicas (with autoscaling, max_replicas) or replicas.tensor_parallel, "
            f"or set replicas.num_gpus to 0 to serve on the CPU"
        )


def _wait_until_ready(config: ServeFile, lines: StatusLines, told: Path) -> None:
    """Block until all models are ready and /ready responds. Raises InvalidSetup with the reason if a deployment fails.

    Replicas report the steps of their startup in the folder `told` (see `app.progress`).
    """
    while True:
        status = serve.status()
        failure = _failure(status)
        if failure:
            raise InvalidSetup(failure)
        doing = _doing(config, status, progress.reported_steps(told))
        if all(what == READY for what in doing.values()) and not _answers_ready(config):
            doing[SERVICE] = f"waiting for {_address(config)}/ready"
        lines.show(doing, done=READY)
        if all(what == READY for what in doing.values()):
            return
        time.sleep(0.3)  # each pass uses 50 ms of CPU time, which the starting processes need


def _doing(config: ServeFile, status: ServeStatus, told: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Return each model's state by name, and under SERVICE the state of the deployments that serve all models.

    `told` maps each model's name to the steps that its replicas have reported (see `app.progress`).
    """
    doing, others = {}, []
    for name, application in config.applications.items():
        overview = status.applications.get(name)
        deployments = {} if overview is None else dict(overview.deployments)
        for model in application.models:
            deployment = deployments.pop(model.deployment_name, None)
            shown = model.name if len(config.applications) == 1 else f"{name}/{model.name}"
            doing[shown] = _doing_of_model(deployment, told.get(model.name, ()))
        others += list(deployments.values())
    troubles = [trouble for trouble in map(_trouble, others) if trouble]
    is_ready = bool(others) and all(each.status == "HEALTHY" for each in others)
    doing[SERVICE] = READY if is_ready else "; ".join(["starting", *troubles])
    return doing


def _doing_of_model(deployment: DeploymentStatusOverview | None, told: Sequence[str]) -> str:
    if deployment is None:
        return "starting"
    if deployment.status == "HEALTHY":
        return READY
    num_replicas, num_ready = sum(deployment.replica_states.values()), deployment.replica_states.get("RUNNING", 0)
    ready = [f"{num_ready} of {num_replicas} replicas are ready"] if num_replicas > 1 and num_ready else []
    steps = [step for step in dict.fromkeys(told) if step != progress.JOINING] or list(told)[:1] or ["starting"]
    return "; ".join([*ready, *steps, *filter(None, [_trouble(deployment)])])


def _trouble(deployment: DeploymentStatusOverview) -> str:
    """Return the last line of Serve's message about a deployment that has not started.

    Returns "" if it is only a message about slow startup. Messages about missing resources are important.
    """
    takes_long = "have taken more than" in deployment.message and "to initialize" in deployment.message
    return "" if takes_long else reason(deployment.message).rpartition("\n")[2]


def _answers_ready(config: ServeFile) -> bool:
    try:
        with urllib.request.urlopen(f"{_address(config)}/ready", timeout=5) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def _failure(status: ServeStatus) -> str:
    """Return why applications have failed, with one reason per line, or "" if none has failed."""
    lines = []
    for name, application in status.applications.items():
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            causes = [
                f"{deployment_name}: {reason(deployment.message)}"
                for deployment_name, deployment in application.deployments.items()
                if deployment.status == "DEPLOY_FAILED" and deployment.message
            ]
            lines.extend(causes or [f"{name}: {reason(application.message)}"])
    return "\n".join(lines)


def reason(message: str) -> str:
    """Return the useful part of Serve's message: the text of our own error if there is one, or the traceback's end."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", message).strip()
    ours = plain.rpartition("\napp.errors.")[2] if "\napp.errors." in plain else ""
    if ours:
        return ours.partition(": ")[2]
    return "\n".join(plain.splitlines()[-12:])


def _report_changes() -> NoReturn:
    """Print a line whenever an application's state changes. Never returns, because a signal ends the process."""
    known = {name: application.status for name, application in serve.status().applications.items()}
    while True:
        time.sleep(10.0)  # each status call uses 30 ms of CPU time in Serve
        for name, application in serve.status().applications.items():
            if known.get(name) != application.status:
                _say(f"{name} is {application.status.value}{': ' * bool(application.message)}{application.message}")
                known[name] = application.status


def _welcome(config: ServeFile, ready_s: float) -> str:
    application = next(iter(config.applications.values()))
    model, needs_key = application.models[0].name, application.api.keys_file
    key = " -H 'Authorization: Bearer <key>'" if needs_key else ""
    url = "" if f"http://{config.host}:{config.port}" == DEFAULT_URL else f" --url {_address(config)}"
    chat = f"or, in another terminal{', with the key in CAROUSEL_API_KEY' * bool(needs_key)}: carousel chat{url}\n"
    endpoint, asked = "chat/completions", '"messages": [{"role": "user", "content": "Count from 3 to 9."}]'
    if not has_chat_template(application.models[0].engine.model.path):
        chat = ""
        endpoint, asked = "completions", '"prompt": "The capital of France is", "max_tokens": 20'
    return (
        f"Ready at {_address(config)} after {ready_s:.0f} s. Try:\n"
        f"  curl {_address(config)}/v1/{endpoint}{key} -H 'Content-Type: application/json' \\\n"
        f'    -d \'{{"model": "{model}", {asked}}}\'\n'
        f"{chat}Stop with Ctrl-C."
    )


def _address(config: ServeFile) -> str:
    host = "127.0.0.1" if config.host in ("0.0.0.0", "::") else config.host
    return f"http://{host}:{config.port}"


def _say(text: str) -> None:
    print(text, flush=True)
