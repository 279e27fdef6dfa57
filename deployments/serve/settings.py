"""Reads and checks `serve.yaml` before anything is started. Does not import Ray, which would be slow."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, Field, ValidationError

from app.child_process import PROJECT
from app.config import (
    ApiConfig,
    ApplicationConfig,
    KeyConfig,
    KeysConfig,
    ModelConfig,
    PricesConfig,
    SchedulerConfig,
    ServedModelConfig,
    mistakes_of,
    shown,
    suggestion,
)
from app.config.checks import check_branches
from app.engine.request import ModelInfo, Pooling
from app.errors import InvalidSetup
from app.fleet.dispatch import Group, groups_of_roles
from app.model.description import is_encoder
from app.model.foreseen import check_model, check_path
from app.model.location import existing_place
from app.model.simulated import SimulatedCosts
from app.webhooks.receiver import check_default

SettingsT = TypeVar("SettingsT", bound=BaseModel)

SERVE_YAML = PROJECT / "deployments" / "serve.yaml"  # the default file
BATCHES_CPUS = 0.1  # reserved for the batches process, which mostly waits for replicas and disks
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
# Reserved for an ingress, which may use a whole core. The reservation is small so that two replicas with half a core
# each, an ingress, and its successor during an update fit on two cores. Larger nodes have cores to spare.
INGRESS_CPUS = 0.25


# The names of Serve's settings by level. A test compares them with Serve's schema. Our own settings are in `args`.
SERVE_NAMES: Mapping[str, tuple[str, ...]] = {
    "": (
        "proxy_location", "http_options", "grpc_options", "controller_options", "logging_config", "tracing_config",
        "applications", "target_capacity",
    ),
    "http_options": (
        "host", "port", "root_path", "request_timeout_s", "keep_alive_timeout_s", "ssl_keyfile", "ssl_certfile",
        "ssl_keyfile_password", "ssl_ca_certs",
    ),
    "grpc_options": ("port", "grpc_servicer_functions", "request_timeout_s", "enable_reflection"),
    "logging_config": (
        "encoding", "log_level", "logs_dir", "enable_access_log", "additional_log_standard_attrs",
    ),
    "applications": (
        "name", "route_prefix", "import_path", "runtime_env", "host", "port", "deployments", "autoscaling_policy",
        "args", "logging_config", "external_scaler_enabled",
    ),
    "deployments": (
        "name", "num_replicas", "max_ongoing_requests", "max_queued_requests", "backpressure_config", "user_config",
        "autoscaling_config", "graceful_shutdown_wait_loop_s", "graceful_shutdown_timeout_s", "health_check_period_s",
        "health_check_timeout_s", "ray_actor_options", "placement_group_bundles", "placement_group_strategy",
        "placement_group_bundle_label_selector", "max_replicas_per_node", "logging_config", "request_router_config",
        "gang_scheduling_config", "deployment_actors", "rolling_update_percentage", "max_surge_percent",
    ),
}  # fmt: skip


class _HttpOptions(BaseModel):
    host: str = "127.0.0.1"
    port: int = Field(8000, ge=1, le=65535, strict=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFile:
    """The parts of a Serve config file that the launcher needs. Serve reads the rest."""

    host: str
    port: int
    applications: dict[str, ApplicationConfig]  # this project's applications, by name
    # (path in `args`, model) for all models with valid settings, even if their application contains other mistakes.
    models: tuple[tuple[str, ServedModelConfig], ...] = ()


class Mistakes(list[str]):
    """A list of mistakes. Each is one line for the user."""

    @contextmanager
    def noted(self, at: str = "") -> Iterator[None]:
        """Return a context that suppresses InvalidSetup and records it. The prefix `at` names the setting."""
        try:
            yield
        except InvalidSetup as error:
            self.extend(f"{at}: {line}" if at else line for line in str(error).splitlines())


def read_serve_file(path: Path) -> ServeFile:
    """Read and check a Serve config file. Raises InvalidSetup with one line per mistake."""
    file, mistakes = examined(path)
    if mistakes:
        raise InvalidSetup("\n".join(mistakes))
    return file


def examined(path: Path) -> tuple[ServeFile, Mistakes]:
    """Return the valid parts of a Serve config file, and all its mistakes.

    Raises InvalidSetup if the file is not a Serve config file or contains no application of this project.
    """
    document = read_yaml(path)
    entries = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidSetup(f"{path}: contains no list of `applications`; see deployments/serve.yaml")
    builder = "deployments.serve.application:build"
    ours = {str(entry.get("name", "default")): entry for entry in entries if entry.get("import_path") == builder}
    if not ours:
        raise InvalidSetup(f"{path}: no application has `import_path: {builder}`")
    mistakes = Mistakes(_unknown_names(document))
    http = _HttpOptions()
    with mistakes.noted():
        http = validated(_HttpOptions, document.get("http_options") or {}, at="http_options")
    applications: dict[str, ApplicationConfig] = {}
    models: list[tuple[str, ServedModelConfig]] = []
    for name, entry in ours.items():
        at = place_in(name, ours)
        with mistakes.noted(at):
            applications[name] = config = parse(entry.get("args"))
            with mistakes.noted(at):
                _check_user_configs(config, _deployments_of(entry))
            with mistakes.noted(at):
                _check_keys(check_exposure(http.host, config.api), config)
        parsed = applications.get(name)
        found = _models_in(entry.get("args")) if parsed is None else enumerate(parsed.models)
        models += ((f"{at}: models[{index}]".removeprefix(": "), model) for index, model in found)
    return ServeFile(host=http.host, port=http.port, applications=applications, models=tuple(models)), mistakes


def place_in(application: str, all_of_them: Collection[str]) -> str:
    """Return a prefix that names an application in messages. Empty if there is only one application."""
    return f"application {application!r}" if len(all_of_them) > 1 else ""


def _deployments_of(application: dict[str, Any]) -> list[dict[str, Any]]:
    deployments = application.get("deployments") or []
    if not isinstance(deployments, list):
        raise InvalidSetup(f"deployments: got {shown(deployments)}; must be a list")
    return deployments


def _unknown_names(document: dict[str, Any]) -> Iterator[str]:
    """Yield a mistake for each setting that Serve does not know and would silently ignore."""
    yield from _unknown(document, "", "")
    for name in ("http_options", "grpc_options", "logging_config"):
        yield from _unknown(document.get(name), name, name)
    for index, application in enumerate(document["applications"]):
        at = f"applications[{index}]"
        yield from _unknown(application, "applications", at)
        yield from _unknown(application.get("logging_config"), "logging_config", f"{at}.logging_config")
        deployments = application.get("deployments")
        for place, deployment in enumerate(deployments if isinstance(deployments, list) else ()):
            yield from _unknown(deployment, "deployments", f"{at}.deployments[{place}]")


def _unknown(given: object, level: str, at: str) -> Iterator[str]:
    known = SERVE_NAMES[level]
    for name in given if isinstance(given, dict) else ():
        if name not in known and not str(name).startswith("x-"):  # entries with `x-` only define YAML anchors
            yield f"{at}.{name}: no such setting{suggestion(str(name), known)}".lstrip(".")


def _models_in(args: object) -> Iterator[tuple[int, ServedModelConfig]]:
    """Yield each model with valid settings, and its index in `args`."""
    given = args.get("models") if isinstance(args, dict) else None
    for index, model in enumerate(given if isinstance(given, list) else ()):
        with suppress(ValidationError):
            yield index, ServedModelConfig.model_validate(model)


def mistakes_of_model(where: str, served: ServedModelConfig, *, are_all_here: bool = True) -> Mistakes:
    """Return all mistakes in the files of a model, its draft model and its adapters.

    `where` is the model's path in the config. `are_all_here` is False on a cluster, where files at absolute paths may
    be on other machines.
    """
    mistakes, engine = Mistakes(), served.engine

    def may_be_elsewhere(path: str) -> bool:  # GGUF files are read on this machine to build the application
        is_absolute = os.path.isabs(os.path.expanduser(path))
        return not are_all_here and is_absolute and not path.endswith(".gguf") and existing_place(path) is None

    for setting, path in engine.model_paths.items():
        with mistakes.noted(f"{where}.engine.{setting}"):
            if may_be_elsewhere(path):
                continue
            if engine.model.simulated is None:
                check_model(engine.model if path == engine.model.path else ModelConfig(path=path))
            else:  # a simulated model only needs a tokenizer
                check_path(path)
    for name, path in served.adapters.items():
        with mistakes.noted(f"{where}.adapters.{name}"):
            if not may_be_elsewhere(path):
                check_path(path)
    place = existing_place(engine.model.path)
    if not mistakes and served.pooling == "cls" and engine.model.simulated is None and place is not None:
        with mistakes.noted(where):
            _check_first_token(served, generates=place.is_file() or not is_encoder(engine.model, str(place)))
    return mistakes


def parse(args: object) -> ApplicationConfig:
    """Parse and check an application's `args`. Raises InvalidSetup with one line per mistake."""
    config = validated(ApplicationConfig, args if args is not None else {})
    check(config)
    return config


def validated(kind: type[SettingsT], given: object, *, at: str = "") -> SettingsT:
    """Parse plain values as settings. Raises InvalidSetup with one line per mistake; `at` is the settings' path."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise InvalidSetup("\n".join(mistakes_of(error, kind, at=at))) from error


def check_exposure(host: str, config: ApiConfig) -> tuple[KeyConfig, ...]:
    """Return the keys in an application's keys file, if it has one. `host` is the address on which Serve listens.

    Raises InvalidSetup if the file contains mistakes, or if other machines could use the application without a key and
    no setting allows this.
    """
    if config.keys_file is not None:
        return read_keys(Path(config.keys_file))
    if host not in LOOPBACK and not config.allow_unauthenticated:
        raise InvalidSetup(
            f"http_options.host: got {host!r} without API keys: every machine that can reach this address could use "
            f"the service; set `api.keys_file` (`carousel key NAME` prints an entry), listen on 127.0.0.1, or set "
            f"`api.allow_unauthenticated: true`"
        )
    return ()


def read_keys(path: Path) -> tuple[KeyConfig, ...]:
    """Return the API keys in a file.

    Raises InvalidSetup if the file is missing or contains no keys, or with one line for each mistake.
    """
    hint = "`carousel key NAME` prints an entry"
    if not os.path.isfile(os.path.expanduser(path)):
        raise InvalidSetup(f"api.keys_file: the file {path} does not exist; create it with a list of keys ({hint})")
    entries = read_yaml(path)
    if not isinstance(entries, list) or not entries:
        raise InvalidSetup(f"{path}: must contain a list of keys; {hint}")
    try:
        return KeysConfig.model_validate({"keys": entries}).keys
    except ValidationError as error:
        mistakes = [str(path) + line.removeprefix("keys") for line in mistakes_of(error, KeysConfig)]
        raise InvalidSetup("\n".join(mistakes)) from None  # the cause would reveal the file's contents


def requested_threads(config: ApplicationConfig) -> list[int | None]:
    """Return `model.num_threads` for every rank of all engines that may run, except simulated engines."""
    models = [model for model in config.models if model.engine.model.simulated is None]
    return [
        model.engine.model.num_threads
        for model in models
        for _ in range(model.replicas.max_replicas * model.replicas.tensor_parallel)
    ]


def max_replica_requests(model: ServedModelConfig) -> int:
    """Return the maximum number of requests on a replica: `max_requests`, and as many background requests."""
    return 2 * model.engine.scheduler.max_requests


def max_ingress_requests(config: ApplicationConfig) -> int:
    """Return the maximum number of concurrent requests for an ingress.

    The limit is twice the capacity of all replicas, so that excess requests still reach the ingress, which refuses them
    with status 429 and an error body in OpenAI's format. A single account may use half of the limit, which is enough to
    fill the replicas.
    """
    held = sum(max_replica_requests(model) * model.replicas.max_replicas for model in config.models)
    min_ingress_requests = 256  # for replicas with little capacity
    return max(2 * held, min_ingress_requests)


def read_yaml(path: Path) -> Any:
    """Read a YAML file. Raises InvalidSetup, which does not quote the file because it may contain keys."""
    try:
        return yaml.safe_load(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSetup(f"{path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f"; see line {error.problem_mark.line + 1}"
        raise InvalidSetup(f"{path}: is not valid YAML{line}") from None
    except Exception as error:  # PyYAML also raises other errors, such as ValueError for the date 2024-13-45
        raise InvalidSetup(f"{path}: is not valid YAML: {type(error).__name__}") from None


def check(config: ApplicationConfig) -> None:
    """Run the checks that `app.config` does not run. Raises InvalidSetup, which names the setting."""
    try:  # checked again, because pydantic does not validate changed copies
        check_branches(config.models, config.pipelines)
    except ValueError as error:
        raise InvalidSetup(str(error)) from error
    for index, model in enumerate(config.models):
        validated(SimulatedCosts, model.engine.model.simulated or {}, at=f"models[{index}].engine.model.simulated")
    if config.batches is not None:
        check_default(config.batches.webhooks)


def apply_override(deployed: SchedulerConfig, user_config: object) -> SchedulerConfig:
    """Return the deployed scheduler settings, changed by a `user_config`.

    Changes always apply to the deployed settings, so the result does not depend on an earlier `user_config`.

    Raises InvalidSetup if a value is invalid, or if a setting cannot change while a replica is running.
    """
    given = user_config if isinstance(user_config, dict) else {"": user_config}
    for name in given.keys() - {"scheduler"}:
        if name in ("model", "cache"):
            raise InvalidSetup(
                f"user_config.{name}: cannot change while a replica is running, because it has allocated its memory; "
                f"change it in the application's args, which restarts the replicas"
            )
        raise InvalidSetup(f"user_config: must be {{'scheduler': {{...}}}}; got {shown(user_config)}")
    changes = given.get("scheduler") or {}
    if not isinstance(changes, dict):
        raise InvalidSetup(f"user_config.scheduler: got {shown(changes)}; must map names to settings")
    try:
        config = deployed.changed(changes)
    except ValidationError as error:
        raise InvalidSetup("\n".join(mistakes_of(error, SchedulerConfig, at="user_config.scheduler"))) from error
    if config.max_requests > deployed.max_requests:
        raise InvalidSetup(
            f"user_config.scheduler: max_running + max_waiting is {config.max_requests:,}, but the replicas were "
            f"deployed for {deployed.max_requests:,}; change it in the application's args"
        )
    return config


def groups_of(model: ServedModelConfig) -> list[Group]:
    """Return a model's dispatch groups: its roles, or otherwise the groups of its A/B trial."""
    num_prefill = model.replicas.prefill_replicas
    if num_prefill is not None:
        return groups_of_roles(prefill=num_prefill, decode=model.replicas.num_replicas - num_prefill)
    return [Group(group.name, group.share, model.scheduler_of(group.name).preset) for group in model.replicas.groups]


def pooling_of(model: ServedModelConfig, model_info: ModelInfo) -> Pooling | None:
    """Return a model's pooling, or None if it has no embeddings. Raises InvalidSetup for unsupported pooling."""
    if model.pooling == "none" or model_info.embedding_size is None:
        return None
    if model.pooling == "auto":
        return Pooling(model_info.pooling or Pooling.LAST)
    _check_first_token(model, generates=model_info.generates)
    return Pooling(model.pooling)


def _check_first_token(model: ServedModelConfig, *, generates: bool) -> None:
    """Raise InvalidSetup if the embedding is taken from the first token, but the model is not an encoder.

    In other models, the first token does not attend to the rest of the text.
    """
    if model.pooling == "cls" and generates:
        raise InvalidSetup(
            f"pooling of {model.name}: got 'cls', which uses the first token; only in encoder models does this token "
            f"see the whole text; use 'last'"
        )


def _check_keys(keys: Iterable[KeyConfig], config: ApplicationConfig) -> None:
    names = [model.name for model in config.models]
    for key in keys:
        unknown = [name for name in key.models if name not in names]
        if unknown:
            raise InvalidSetup(
                f"the API key {key.name!r} allows an unknown model {unknown[0]!r}; the models are {', '.join(names)}"
            )
        if key.budgets and config.batches is None:
            raise InvalidSetup(
                f"the API key {key.name!r} has {next(iter(key.budgets))}, but usage would be lost in a restart; set "
                f"`batches: {{}}`, whose process stores the usage ledger"
            )
        models = [model for model in config.models if model.name in (key.models or names)]
        if key.money_per_month is not None and not any(model.prices != PricesConfig() for model in models):
            raise InvalidSetup(
                f"the API key {key.name!r} has money_per_month, but none of its models has a price; set models[].prices"
            )


def _check_user_configs(config: ApplicationConfig, deployments: Iterable[dict[str, Any]]) -> None:
    """Check each deployment's name and `user_config`, which Serve will pass to replicas. Raises InvalidSetup."""
    models = {model.deployment_name: model for model in config.models}
    known = [*models, "ingress", *(("batches",) if config.batches is not None else ())]
    for index, deployment in enumerate(deployments):
        if not isinstance(deployment, dict):
            raise InvalidSetup(f"deployments[{index}]: got {shown(deployment)}; must map names to settings")
        name = str(deployment.get("name"))
        if name not in known:
            raise InvalidSetup(f"deployments[{index}].name: got {name!r}{suggestion(name, known)}")
        if (model := models.get(name)) is not None and deployment.get("user_config") is not None:
            apply_override(model.engine.scheduler, deployment["user_config"])
