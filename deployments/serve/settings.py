"""Reads and checks `serve.yaml` before anything starts; each mistake is one line. No Ray here: it takes no time."""

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
from app.errors import InvalidSetup
from app.fleet.dispatch import Group, groups_of_roles
from app.model.foreseen import check_model, check_path
from app.model.location import existing_place
from app.model.simulated import SimulatedCosts
from app.webhooks.receiver import check_default

SettingsT = TypeVar("SettingsT", bound=BaseModel)

SERVE_YAML = PROJECT / "deployments" / "serve.yaml"  # what is served where nothing else is named
BATCHES_CPUS = 0.1  # reserved for the process of batches: it waits for replicas and disks most of the time
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
# What Ray reserves for an ingress; it may use a core. So little that two replicas of half a core, an ingress and the
# next one of an update find room on two cores. On a larger node an ingress uses what the replicas do not reserve.
INGRESS_CPUS = 0.25


# The settings that Serve has, level by level; a test compares them with its schema. Our own are in `args`.
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
    """The parts of a Serve config file that the launcher acts on; Serve reads the rest."""

    host: str
    port: int
    applications: dict[str, ApplicationConfig]  # ours, by the name of the Serve application
    # All models whose own settings can be read, each with its place in `args`: also those of an application that has a
    # mistake elsewhere.
    models: tuple[tuple[str, ServedModelConfig], ...] = ()


class Mistakes(list[str]):
    """Mistakes that are found one after the other, a line each."""

    @contextmanager
    def noted(self, at: str = "") -> Iterator[None]:
        """Note an InvalidSetup, and go on behind it. at: the path of the setting, where the error does not name it."""
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
    """What can be read of a Serve config file, and all mistakes in it.

    Raises InvalidSetup if it is no such file at all.
    """
    document = read_yaml(path)
    entries = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidSetup(f"{path}: has no list of `applications`; see deployments/serve.yaml")
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
        models += ((f"{at}: {where}" if at else where, model) for where, model in _models_in(entry.get("args")))
        with mistakes.noted(at):
            applications[name] = config = parse(entry.get("args"))
            with mistakes.noted(at):
                _check_user_configs(config, _deployments_of(entry))
            with mistakes.noted(at):
                _check_keys(check_exposure(http.host, config.api), config)
    return ServeFile(host=http.host, port=http.port, applications=applications, models=tuple(models)), mistakes


def place_in(application: str, all_of_them: Collection[str]) -> str:
    """How a mistake names the application that it is in: not at all if there is no other."""
    return f"application {application!r}" if len(all_of_them) > 1 else ""


def _deployments_of(application: dict[str, Any]) -> list[dict[str, Any]]:
    deployments = application.get("deployments") or []
    if not isinstance(deployments, list):
        raise InvalidSetup(f"deployments: got {shown(deployments)}; must be a list")
    return deployments


def _unknown_names(document: dict[str, Any]) -> Iterator[str]:
    """A line for each name that Serve would pass over in silence."""
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
        if name not in known and not str(name).startswith("x-"):  # YAML's own place for what is used again
            yield f"{at}.{name}: no such setting{suggestion(str(name), known)}".lstrip(".")


def _models_in(args: object) -> Iterator[tuple[str, ServedModelConfig]]:
    given = args.get("models") if isinstance(args, dict) else None
    for index, model in enumerate(given if isinstance(given, list) else ()):
        with suppress(ValidationError):
            yield f"models[{index}]", ServedModelConfig.model_validate(model)


def mistakes_of_model(where: str, served: ServedModelConfig, *, are_all_here: bool = True) -> Mistakes:
    """All mistakes in the files of a model, its draft model and its adapters.

    where: the place of the model in the config. are_all_here: a file with an absolute path that is not on this machine
    is a mistake, too. On a cluster, such a file may be on other machines.
    """
    mistakes, engine = Mistakes(), served.engine

    def may_be_elsewhere(path: str) -> bool:  # a GGUF file is read where the application is built
        is_absolute = os.path.isabs(os.path.expanduser(path))
        return not are_all_here and is_absolute and not path.endswith(".gguf") and existing_place(path) is None

    for setting, path in engine.model_paths.items():
        with mistakes.noted(f"{where}.engine.{setting}"):
            if may_be_elsewhere(path):
                continue
            if engine.model.simulated is None:
                check_model(engine.model if path == engine.model.path else ModelConfig(path=path))
            else:  # it has no weights, and reads the tokenizer
                check_path(path)
    for name, path in served.adapters.items():
        with mistakes.noted(f"{where}.adapters.{name}"):
            if not may_be_elsewhere(path):
                check_path(path)
    return mistakes


def parse(args: object) -> ApplicationConfig:
    """The checked config in an application's `args`. Raises InvalidSetup with one line per mistake."""
    config = validated(ApplicationConfig, args if args is not None else {})
    check(config)
    return config


def validated(kind: type[SettingsT], given: object, *, at: str = "") -> SettingsT:
    """Settings from plain values. Raises InvalidSetup with one line per mistake; `at`: where the values are from."""
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise InvalidSetup("\n".join(mistakes_of(error, kind, at=at))) from error


def check_exposure(host: str, config: ApiConfig) -> tuple[KeyConfig, ...]:
    """The keys of an application, which are read from its file; none without a file.

    Raises InvalidSetup for mistakes in the file, and when other machines could use the application without a key and no
    setting allows it. host: where Serve listens.
    """
    if config.keys_file is not None:
        return read_keys(Path(config.keys_file))
    if host not in LOOPBACK and not config.allow_unauthenticated:
        raise InvalidSetup(
            f"http_options.host: got {host!r} without API keys: every machine that reaches this one could use it; "
            f"give the application `api.keys_file` (`carousel key NAME` prints an entry), listen on "
            f"127.0.0.1, or set `api.allow_unauthenticated: true`"
        )
    return ()


def read_keys(path: Path) -> tuple[KeyConfig, ...]:
    """The API keys in a file, at least one. Raises InvalidSetup with one line per mistake."""
    hint = "`carousel key NAME` prints an entry"
    if not os.path.isfile(os.path.expanduser(path)):
        raise InvalidSetup(f"api.keys_file: there is no file {path}; {hint} of the list that the file should have")
    entries = read_yaml(path)
    if not isinstance(entries, list) or not entries:
        raise InvalidSetup(f"{path}: should be a list of keys; {hint}")
    try:
        return KeysConfig.model_validate({"keys": entries}).keys
    except ValidationError as error:
        mistakes = [str(path) + line.removeprefix("keys") for line in mistakes_of(error, KeysConfig)]
        raise InvalidSetup("\n".join(mistakes)) from None  # it would show what is in the file


def asked_threads(config: ApplicationConfig) -> list[int | None]:
    """`model.num_threads` of every engine that there can be at once, of every rank of it.

    Simulated engines are left out: they compute nothing.
    """
    models = [model for model in config.models if model.engine.model.simulated is None]
    return [
        model.engine.model.num_threads
        for model in models
        for _ in range(model.replicas.max_replicas * model.replicas.tensor_parallel)
    ]


def max_replica_requests(model: ServedModelConfig) -> int:
    """What one replica holds at most: background requests, of which there may be as many, count beside the others."""
    return 2 * model.engine.scheduler.max_requests


def max_ingress_requests(config: ApplicationConfig) -> int:
    """What one ingress serves at once.

    Twice what the replicas hold: the ingress must have room to say 429 itself, with an OpenAI body, and one account
    alone, which may take half of it, can fill the replicas.
    """
    held = sum(max_replica_requests(model) * model.replicas.max_replicas for model in config.models)
    min_ingress_requests = 256  # however few the replicas hold: most requests to an ingress do not reach a replica then
    return max(2 * held, min_ingress_requests)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file. Raises InvalidSetup, never with the content: it may have keys."""
    try:
        return yaml.safe_load(Path(os.path.expanduser(path)).read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSetup(f"{path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise InvalidSetup(f"{path}: is not YAML: mistake{line}") from None
    except Exception as error:  # PyYAML's own functions raise any kind: ValueError for the date 2024-13-45
        raise InvalidSetup(f"{path}: is not YAML: {type(error).__name__}") from None


def check(config: ApplicationConfig) -> None:
    """Raise InvalidSetup, with the field, for what only the part that uses it can judge. The rest is in app.config."""
    try:  # again: a copy with changes is not validated
        check_branches(config.models, config.pipelines)
    except ValueError as error:
        raise InvalidSetup(str(error)) from error
    for index, model in enumerate(config.models):
        validated(SimulatedCosts, model.engine.model.simulated or {}, at=f"models[{index}].engine.model.simulated")
    if config.batches is not None:
        check_default(config.batches.webhooks)


def apply_override(deployed: SchedulerConfig, user_config: object) -> SchedulerConfig:
    """The scheduler's settings under a `user_config`: what it names, and for the rest what was deployed.

    So the same `user_config` always means the same, whatever was set before.

    Raises:
        InvalidSetup: it names something that cannot change while a replica runs, or a value is wrong.
    """
    given = user_config if isinstance(user_config, dict) else {"": user_config}
    for name in given.keys() - {"scheduler"}:
        if name in ("model", "cache"):
            raise InvalidSetup(
                f"user_config.{name}: cannot change while a replica runs, its memory was sized when it started; "
                f"change it in the application's args, which restarts the replicas"
            )
        raise InvalidSetup(f"user_config: must be {{'scheduler': {{...}}}}; got {shown(user_config)}")
    changes = given.get("scheduler") or {}
    if not isinstance(changes, dict):
        raise InvalidSetup(f"user_config.scheduler: got {shown(changes)}; must be settings by name")
    try:
        config = deployed.changed(changes)
    except ValidationError as error:
        raise InvalidSetup("\n".join(mistakes_of(error, SchedulerConfig, at="user_config.scheduler"))) from error
    if config.max_requests > deployed.max_requests:
        raise InvalidSetup(
            f"user_config.scheduler: max_running + max_waiting is {config.max_requests:,}; the replicas were deployed "
            f"for {deployed.max_requests:,}: change it in the application's args"
        )
    return config


def groups_of(model: ServedModelConfig) -> list[Group]:
    """The arms of a model's trial, or its roles, as dispatch knows them."""
    roles = model.replicas.roles
    if roles is not None:
        return groups_of_roles(prefill=roles.prefill, decode=roles.decode)
    return [Group(group.name, group.share, model.scheduler_of(group.name).preset) for group in model.replicas.groups]


def _check_keys(keys: Iterable[KeyConfig], config: ApplicationConfig) -> None:
    names = [model.name for model in config.models]
    for key in keys:
        unknown = [name for name in key.models if name not in names]
        if unknown:
            raise InvalidSetup(f"the API key of {key.name!r} is for {unknown[0]!r}; there are {', '.join(names)}")
        if key.budgets and config.batches is None:
            raise InvalidSetup(
                f"the API key of {key.name!r} has {next(iter(key.budgets))}, and nothing keeps what it has used over a "
                f"restart: set `batches: {{}}`, whose process keeps the ledger"
            )
        models = [model for model in config.models if model.name in (key.models or names)]
        if key.money_per_month is not None and not any(model.prices != PricesConfig() for model in models):
            raise InvalidSetup(
                f"the API key of {key.name!r} has money_per_month, and none of its models has a price; set "
                f"models[].prices"
            )


def _check_user_configs(config: ApplicationConfig, deployments: Iterable[dict[str, Any]]) -> None:
    """The settings for `reconfigure`, checked before they reach the replicas."""
    models = {model.deployment_name: model for model in config.models}
    known = [*models, "ingress", *(("batches",) if config.batches is not None else ())]
    for index, deployment in enumerate(deployments):
        if not isinstance(deployment, dict):
            raise InvalidSetup(f"deployments[{index}]: got {shown(deployment)}; must be settings by name")
        name = str(deployment.get("name"))
        if name not in known:
            raise InvalidSetup(f"deployments[{index}].name: got {name!r}{suggestion(name, known)}")
        if (model := models.get(name)) is not None and deployment.get("user_config") is not None:
            apply_override(model.engine.scheduler, deployment["user_config"])
