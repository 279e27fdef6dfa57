"""Reads and checks `serve.yaml` before anything starts; each mistake is one line. No Ray here: it takes no time."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from app.config import (
    ApiConfig,
    ApplicationConfig,
    KeyConfig,
    KeysConfig,
    SchedulerConfig,
    ServedModelConfig,
    branches_of,
    branches_within,
    choice_of,
    leaves,
    names_of,
)
from app.errors import InvalidSetup
from app.fleet.dispatch import Group
from app.jobs.files import filesystem_at
from app.model.simulated import SimulatedCosts
from app.webhooks.receiver import check_default

BUILDER = "deployments.serve.application:build"
BATCHES_CPUS = 0.1  # reserved for the process of batches: it waits for replicas and disks most of the time
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
# What Ray reserves for an ingress; it may use a core. So little that two replicas of half a core, an ingress and the
# next one of an update find room on two cores. On a larger node an ingress uses what the replicas do not reserve.
INGRESS_CPUS = 0.25
MIN_INGRESS_REQUESTS = 256  # however few the replicas hold: most requests to an ingress do not reach a replica then


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeFile:
    """The parts of a Serve config file that the launcher acts on; Serve reads the rest."""

    host: str
    port: int
    applications: dict[str, ApplicationConfig]  # ours, by the name of the Serve application


def read_serve_file(path: Path) -> ServeFile:
    """Read and check a Serve config file. Raises InvalidSetup with one line per mistake."""
    document = _read_yaml(path)
    entries = document.get("applications") if isinstance(document, dict) else None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise InvalidSetup(f"{path}: has no list of `applications`; see deployments/serve.yaml")
    ours = {str(entry.get("name", "default")): entry for entry in entries if entry.get("import_path") == BUILDER}
    if not ours:
        raise InvalidSetup(f"{path}: no application has `import_path: {BUILDER}`")
    http = document.get("http_options") or {}
    applications = {name: parse(entry.get("args")) for name, entry in ours.items()}
    for name, entry in ours.items():
        _check_user_configs(applications[name], entry.get("deployments") or [])
    file = ServeFile(
        host=str(http.get("host", "127.0.0.1")), port=_port(http.get("port", 8000)), applications=applications
    )
    for config in applications.values():
        check_exposure(file.host, config.api)
        if config.api.keys_file is not None:
            _check_models_of_keys(read_keys(Path(config.api.keys_file)), config)
    return file


def parse(args: object) -> ApplicationConfig:
    """The checked config in an application's `args`. Raises InvalidSetup with one line per mistake."""
    try:
        config = ApplicationConfig.model_validate(args if args is not None else {})
    except ValidationError as error:
        raise InvalidSetup("\n".join(map(_mistake, _causes(error)))) from error
    check(config)
    return config


def check_exposure(host: str, config: ApiConfig) -> None:
    """Raise InvalidSetup when other machines could use an application without a key and no setting allows it.

    `host` is where Serve listens. Reads the file of keys too, and raises for its mistakes.
    """
    if config.keys_file is not None:
        read_keys(Path(config.keys_file))
    elif host not in LOOPBACK and not config.allow_unauthenticated:
        raise InvalidSetup(
            f"http_options.host: got {host!r} without API keys: every machine that reaches this one could use it; "
            f"give the application `api.keys_file` (`carousel key NAME` prints an entry), listen on "
            f"127.0.0.1, or set `api.allow_unauthenticated: true`"
        )


def read_keys(path: Path) -> tuple[KeyConfig, ...]:
    """The API keys in a file, at least one. Raises InvalidSetup with one line per mistake."""
    entries = _read_yaml(path)
    if not isinstance(entries, list) or not entries:
        raise InvalidSetup(f"{path}: should be a list of keys; `carousel key NAME` prints an entry")
    try:
        return KeysConfig.model_validate({"keys": entries}).keys
    except ValidationError as error:
        mistakes = [str(path) + _mistake(detail, KeysConfig).removeprefix("keys") for detail in _causes(error)]
        raise InvalidSetup("\n".join(mistakes)) from None  # it would show what is in the file


def num_pool_engines(config: ApplicationConfig) -> int:
    """One batch at a time has engines."""
    return 0 if config.batches is None else config.batches.engines


def asked_threads(config: ApplicationConfig) -> list[int | None]:
    """`model.num_threads` of every engine that there can be at once, those of a batch among them; of every rank of it.

    Simulated engines are left out: they compute nothing.
    """
    models = [model for model in config.models if model.engine.model.simulated is None]
    asked = [
        model.engine.model.num_threads
        for model in models
        for _ in range(model.replicas.max_replicas * model.replicas.tensor_parallel)
    ]
    given = [number for number in asked if number is not None]
    of_a_batch = max(given) if asked and len(given) == len(asked) else None  # its items may be for any of the models
    return asked + [of_a_batch] * (num_pool_engines(config) if models else 0)


def max_replica_requests(model: ServedModelConfig) -> int:
    """What one replica holds at most: background requests, of which there may be as many, count beside the others."""
    return 2 * model.engine.scheduler.max_requests


def max_ingress_requests(config: ApplicationConfig) -> int:
    """What one ingress serves at once.

    Twice what the replicas hold: the ingress must have room to say 429 itself, with an OpenAI body, and one account
    alone, which may take half of it, can fill the replicas.
    """
    held = sum(max_replica_requests(model) * model.replicas.max_replicas for model in config.models)
    return max(2 * held, MIN_INGRESS_REQUESTS)


def _read_yaml(path: Path) -> Any:
    """The content of a YAML file. Raises InvalidSetup, never with the content: it may have keys."""
    try:
        return yaml.safe_load(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidSetup(f"{path}: {error.strerror}") from error
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise InvalidSetup(f"{path}: is not YAML: mistake{line}") from None
    except Exception as error:  # PyYAML's own functions raise any kind: ValueError for the date 2024-13-45
        raise InvalidSetup(f"{path}: is not YAML: {type(error).__name__}") from None


def check(config: ApplicationConfig) -> None:
    """Raise InvalidSetup, with the field, for what no single field's check can see."""
    by_deployment: dict[str, str] = {}
    for index, model in enumerate(config.models):
        where = f"models[{index}]"
        _check_device(where, model)
        _check_simulated(where, model)
        twin = by_deployment.setdefault(deployment_name(model), model.name)
        if twin != model.name:
            raise InvalidSetup(
                f"{where}.name: got {model.name!r}, too like {twin!r}: both would be the Serve deployment "
                f"{deployment_name(model)!r}; change more than punctuation"
            )
    if config.batches is not None:
        check_default(config.batches.webhooks)
        if config.batches.files is not None:
            filesystem_at(config.batches.files)


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
        raise InvalidSetup(f"user_config: must be {{'scheduler': {{...}}}}; got {_shown(user_config)}")
    changes = given.get("scheduler") or {}
    if not isinstance(changes, dict):
        raise InvalidSetup(f"user_config.scheduler: got {_shown(changes)}; must be settings by name")
    try:
        config = deployed.changed(changes)
    except ValidationError as error:
        place = ("models", 0, "engine", "scheduler")
        mistakes = [_mistake({**detail, "loc": (*place, *detail["loc"])}) for detail in _causes(error)]
        raise InvalidSetup("\n".join(mistakes).replace(_path(place), "user_config.scheduler")) from error
    if config.max_requests > deployed.max_requests:
        raise InvalidSetup(
            f"user_config.scheduler: max_running + max_waiting is {config.max_requests:,}; the replicas were deployed "
            f"for {deployed.max_requests:,}: change it in the application's args"
        )
    return config


def groups_of(model: ServedModelConfig) -> list[Group]:
    """The arms of a model's trial, as dispatch knows them."""
    return [Group(group.name, group.share, model.scheduler_of(group.name).preset) for group in model.replicas.groups]


def deployment_name(model: ServedModelConfig) -> str:
    """The Serve deployment of a model; Serve forbids some of what model names may have."""
    return "replica-" + re.sub(r"[^A-Za-z0-9_.-]", "-", model.name)


def _check_models_of_keys(keys: Iterable[KeyConfig], config: ApplicationConfig) -> None:
    names = [model.name for model in config.models]
    for key in keys:
        unknown = [name for name in key.models if name not in names]
        if unknown:
            raise InvalidSetup(f"the API key of {key.name!r} is for {unknown[0]!r}; there are {', '.join(names)}")


def _check_user_configs(config: ApplicationConfig, deployments: Iterable[dict[str, Any]]) -> None:
    """The settings for `reconfigure`, checked before they reach the replicas."""
    models = {deployment_name(model): model for model in config.models}
    for deployment in deployments:
        model = models.get(str(deployment.get("name")))
        if model is not None and deployment.get("user_config") is not None:
            apply_override(model.engine.scheduler, deployment["user_config"])


def _check_device(where: str, model: ServedModelConfig) -> None:
    device, num_gpus = model.engine.model.device, model.replicas.num_gpus
    if device == "cuda" and num_gpus == 0:
        raise InvalidSetup(
            f"{where}.replicas.num_gpus: got 0 with engine.model.device 'cuda'; a replica sees only the GPUs "
            f"reserved for it: set num_gpus to 1, or device to 'cpu'"
        )
    if device == "cpu" and num_gpus > 0:
        raise InvalidSetup(
            f"{where}.replicas.num_gpus: got {num_gpus:g} with engine.model.device 'cpu'; set num_gpus to 0, "
            f"or device to 'auto'"
        )
    if num_gpus > 1:
        raise InvalidSetup(
            f"{where}.replicas.num_gpus: got {num_gpus:g}; it is at most 1. For {num_gpus:g} GPUs to each replica set "
            f"num_gpus to 1 and replicas.tensor_parallel to {num_gpus:g}"
        )
    _check_ranks(where, model)


def _check_ranks(where: str, model: ServedModelConfig) -> None:
    size, num_gpus = model.replicas.tensor_parallel, model.replicas.num_gpus
    if size == 1:
        return
    if 0 < num_gpus < 1:
        raise InvalidSetup(
            f"{where}.replicas.num_gpus: got {num_gpus:g} with tensor_parallel {size}; each of these needs a GPU of "
            f"its own: set num_gpus to 1"
        )
    if model.engine.model.simulated is not None:
        raise InvalidSetup(
            f"{where}.replicas.tensor_parallel: got {size} with a simulated model, which computes nothing; set it to 1"
        )


def _check_simulated(where: str, model: ServedModelConfig) -> None:
    try:
        SimulatedCosts.model_validate(model.engine.model.simulated or {})
    except ValidationError as error:
        path = f"{where}.engine.model.simulated"
        mistakes = [f"{path}.{_mistake(detail, SimulatedCosts)}" for detail in _causes(error)]
        raise InvalidSetup("\n".join(mistakes)) from error


def _port(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 < value < 65536:
        raise InvalidSetup(f"http_options.port: got {value!r}; must be a number from 1 to 65535")
    return value


def _causes(error: ValidationError) -> list[ErrorDetails]:
    """The mistakes without their echoes: pydantic also calls a list too short when its only entry has a mistake."""
    details = error.errors(include_url=False)
    parents = {detail["loc"][:depth] for detail in details for depth in range(len(detail["loc"]))}
    return [detail for detail in details if detail["type"] != "too_short" or detail["loc"] not in parents]


def _mistake(detail: ErrorDetails, root: type[BaseModel] = ApplicationConfig) -> str:
    """One line: `models[0].engine.scheduler.max_running: got 0; must be greater than or equal to 1`."""
    where = _path(_without_kinds(detail["loc"]))
    if detail["type"] == "extra_forbidden":
        return f"{where}: no such setting{_suggestion(detail['loc'], root)}"
    if detail["type"] == "value_error":  # a check of ours: its message has the values and the fix
        text = detail["msg"].removeprefix("Value error, ")
        return f"{where}: {text}" if where else text
    text = detail["msg"].replace("Input should be", "must be").replace("Input should", "must")
    return f"{where or 'args'}: got {_shown(detail['input'])}; {text[:1].lower()}{text[1:]}"


def _path(location: Iterable[int | str]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).lstrip(".")


def _without_kinds(location: Iterable[int | str]) -> list[int | str]:
    """Behind a choice by name, pydantic adds the name to the path of its parameters; a config file does not."""
    known, kept = dict(leaves(ApplicationConfig)), list[int | str]()
    for part in location:
        choice = known.get(re.sub(r"\[\d+\]", "[]", _path(kept)))
        if choice is None or part not in names_of(choice):
            kept.append(part)
    return kept


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _suggestion(location: tuple[int | str, ...], root: type[BaseModel]) -> str:
    branch: Any = root
    for part in location[:-1]:
        if isinstance(part, int):
            branch = get_args(branch)[0]
        elif isinstance(branch, type) and issubclass(branch, BaseModel):
            branch = _annotation(branch.model_fields[part])
        else:  # one of several kinds, by its name
            branch = next(kind for kind in branches_within(branch) if choice_of(kind) == part)
    assert issubclass(branch, BaseModel), "only a branch of settings can have an extra field"
    close = difflib.get_close_matches(str(location[-1]), branch.model_fields, n=1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(branch.model_fields)}"


def _annotation(field: FieldInfo) -> Any:
    """What a setting holds; the branch itself where it may be left out."""
    inner = branches_of(field)
    return inner[0] if field.default is None and inner else field.annotation
