"""The typed Serve builder that `serve.yaml` names: one replica deployment per model, one ingress in front."""

# No `from __future__ import annotations`: Serve reads the builder's annotation to make the pydantic model from `args`.

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
    asked_threads,
    check,
    max_ingress_requests,
    max_replica_requests,
    mistakes_of_model,
)

_IN_COMMON: Any = {
    # How often a stopping replica looks whether it has drained; Serve's 2 s would be the shortest stop.
    "graceful_shutdown_wait_loop_s": 0.5,
    "health_check_period_s": 5.0,
    # A replica must answer within this; its loop is never blocked, the engine computes in its own thread.
    "health_check_timeout_s": 15.0,
    # A model that cannot be loaded stays so; the second and third try are for memory that was not free yet.
    "max_constructor_retry_count": 3,
}


def build(args: ApplicationConfig) -> Application:
    """The application that `args` describes.

    Raises InvalidSetup, with a line for each mistake, if its parts do not fit together or a model cannot be served.
    """
    check(args)
    mistakes = Mistakes()
    for index, model in enumerate(args.models):
        mistakes += mistakes_of_model(f"models[{index}]", model, are_all_here=False)
    if mistakes:
        raise InvalidSetup("\n".join(mistakes))
    models = [model.model_copy(update={"engine": _engine_config(model)}) for model in args.models]
    threads = asked_threads(args)
    replicas = {model.name: _replica_deployment(model, args.ingress).bind(model, threads) for model in models}
    paths = {model.name: model.engine.model.path for model in models}
    args = _at_absolute_paths(args)
    if args.batches is None:
        return _ingress_deployment(args).bind(args, paths, replicas)
    batches = _batches_deployment().bind(args, paths, replicas)
    return _ingress_deployment(args).bind(args, paths, replicas, batches)


def _at_absolute_paths(config: ApplicationConfig) -> ApplicationConfig:
    """Deployments may run in another folder than this."""
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
        # Requests come over sockets, and the engine refuses what is beyond its limits. Serve counts calls for control,
        # of each ingress and of the batches, twice as many while one is replaced, and one call for each request that
        # waits for the first replica.
        max_ongoing_requests=max_requests + 2 * (ingress.num_replicas + 1) + 8,
        # The router refuses when all are full; this bounds those that wait while no replica is there at all.
        max_queued_requests=max_requests * replicas.max_replicas,
        graceful_shutdown_timeout_s=replicas.drain_timeout_s,
        max_surge_percent=replicas.max_surge_percent,
        **_IN_COMMON,
        request_router_config=RequestRouterConfig(request_router_class="deployments.serve.router.RegistryRouter"),
    )


def _ingress_deployment(config: ApplicationConfig) -> serve.Deployment:
    # Of the ingresses, rounded up: an update starts the next one before it stops one. Otherwise a request
    # that comes between the stop of a single ingress and the start of the next waits at Serve's proxy for that long.
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
    # All calls are short, and files go over in pieces. A response that its client waits for holds one call until it is
    # accepted, and each ingress has one call for the stream of the answers that it reads.
    max_batch_calls = 256 + 2 * BatchLimits().max_responses
    # Calls end in moments, and batches go on after a restart.
    batches_drain_timeout_s = 2.0
    return serve.deployment(Batches).options(
        name="batches",
        num_replicas=1,  # one writer
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
