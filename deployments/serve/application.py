"""Builds the Serve application that `serve.yaml` refers to: one replica deployment per model, ingress and batches."""

# No `from __future__ import annotations`: Serve reads the annotation of `build` to validate `args` with pydantic.

from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import RequestRouterConfig

from app.batches import BatchLimits
from app.config import ApplicationConfig, EngineConfig, IngressConfig, ServedModelConfig
from app.errors import InvalidSetup
from app.model.location import resolve_model_path
from deployments.serve.autoscaling import number_of_replicas
from deployments.serve.batches import Batches
from deployments.serve.ingress import Ingress
from deployments.serve.replica import Replica
from deployments.serve.settings import (
    BATCHES_CPUS,
    INGRESS_CPUS,
    Mistakes,
    check,
    max_ingress_requests,
    max_replica_requests,
    mistakes_of_model,
    requested_threads,
)

_IN_COMMON: Any = {
    # How often Serve checks whether a stopping replica has drained. The default of 2 s would delay every stop.
    "graceful_shutdown_wait_loop_s": 0.5,
    "health_check_period_s": 5.0,
    # The engine runs in its own thread, so the event loop of a healthy replica responds much sooner.
    "health_check_timeout_s": 15.0,
    # A retry only helps if memory was not free yet. All other errors during loading are permanent.
    "max_constructor_retry_count": 3,
}


def build(args: ApplicationConfig) -> Application:
    """Return the Serve application for a configuration.

    Raises InvalidSetup, with one line per mistake, if settings contradict each other or a model cannot be served.
    """
    check(args)
    mistakes = Mistakes()
    for index, model in enumerate(args.models):
        mistakes += mistakes_of_model(f"models[{index}]", model, are_all_here=False)
    if mistakes:
        raise InvalidSetup("\n".join(mistakes))
    models = [model.model_copy(update={"engine": _engine_config(model)}) for model in args.models]
    threads = requested_threads(args)
    replicas = {model.name: _replica_deployment(model, args.ingress).bind(model, threads) for model in models}
    paths = {model.name: model.engine.model.path for model in models}
    args = _at_absolute_paths(args)
    if args.batches is None:
        return _ingress_deployment(args).bind(args, paths, replicas)
    batches = _batches_deployment().bind(args, paths, replicas)
    return _ingress_deployment(args).bind(args, paths, replicas, batches)


def _at_absolute_paths(config: ApplicationConfig) -> ApplicationConfig:
    """Make all paths absolute, because deployments may run in another working directory."""
    if config.api.keys_file is not None:
        config = config.with_setting("api.keys_file", _absolute(config.api.keys_file))
    batches = config.batches
    if batches is not None:
        config = config.with_setting("batches.path", _absolute(batches.path))
        if batches.webhooks.secret_file is not None:
            config = config.with_setting("batches.webhooks.secret_file", _absolute(batches.webhooks.secret_file))
    return config


def _absolute(path: str) -> str:
    return str(Path(path).expanduser().absolute())


def _replica_deployment(model: ServedModelConfig, ingress: IngressConfig) -> serve.Deployment:
    replicas = model.replicas
    max_requests = max_replica_requests(model)
    return serve.deployment(Replica).options(
        name=model.deployment_name,
        **number_of_replicas(model),
        ray_actor_options={"num_cpus": replicas.reserved_cpus, "num_gpus": replicas.reserved_gpus},
        # Requests are sent over sockets and limited by the engine. Serve counts only requests that wait for the first
        # replica, and control calls from ingresses and the batches process, whose number doubles during an update.
        max_ongoing_requests=max_requests + 2 * (ingress.num_replicas + 1) + 8,
        # The router refuses calls when all replicas are full. This limit applies while no replica is running.
        max_queued_requests=max_requests * replicas.max_replicas,
        graceful_shutdown_timeout_s=replicas.drain_timeout_s,
        max_surge_percent=replicas.max_surge_percent,
        **_IN_COMMON,
        request_router_config=RequestRouterConfig(request_router_class="deployments.serve.router.RegistryRouter"),
    )


def _ingress_deployment(config: ApplicationConfig) -> serve.Deployment:
    # Serve rounds up, so an update starts a new ingress before it stops an old one. Otherwise, requests would wait in
    # Serve's proxy while a single ingress is replaced.
    ingress_surge_percent = 1
    return serve.deployment(serve.ingress()(Ingress)).options(
        name="ingress",
        num_replicas=config.ingress.num_replicas,
        max_surge_percent=ingress_surge_percent,
        ray_actor_options={"num_cpus": INGRESS_CPUS},
        max_ongoing_requests=max_ingress_requests(config),
        graceful_shutdown_timeout_s=max(model.replicas.drain_timeout_s for model in config.models),
        **_IN_COMMON,
    )


def _batches_deployment() -> serve.Deployment:
    # Calls are short, because files are sent in pieces. Only two kinds last longer: the call for a stored response
    # until the response is accepted, and one call per ingress that streams stored answers.
    max_batch_calls = 256 + 2 * BatchLimits().max_responses
    batches_drain_timeout_s = 2.0  # short, because batches resume after a restart
    return serve.deployment(Batches).options(
        name="batches",
        num_replicas=1,  # the folder may have only one writer
        ray_actor_options={"num_cpus": BATCHES_CPUS},
        max_ongoing_requests=max_batch_calls,
        max_queued_requests=max_batch_calls,
        graceful_shutdown_timeout_s=batches_drain_timeout_s,
        **_IN_COMMON,
    )


def _engine_config(model: ServedModelConfig) -> EngineConfig:
    asked = model.engine.model
    granted = "cuda" if model.replicas.num_gpus else "cpu"
    device = granted if asked.device == "auto" else asked.device
    resolved = asked.model_copy(update={"path": resolve_model_path(asked.path), "device": device})
    return model.engine.model_copy(update={"model": resolved})
