"""`carousel check CONFIG or MODEL` finds all mistakes that can be found without Ray and without loading a model.

`carousel serve` runs the same checks before it starts Ray. The checks write nothing to disk.
"""

from __future__ import annotations

import argparse
import errno
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from app.config import GIB, ModelConfig, ServedModelConfig
from app.errors import InvalidSetup
from app.model.foreseen import check_model, weights_bytes
from app.model.host_memory import check_host_memory
from deployments.launcher.arguments import is_config
from deployments.launcher.trial import check_name, is_known
from deployments.serve.settings import SERVE_YAML, Mistakes, ServeFile, examined, mistakes_of_model, place_in

MISTAKES = 2  # the exit status
# The smallest fraction of a float32 file that is kept in memory, by `model.quantization`; 0.5 without quantization.
_LEFT = {"int8": 0.25, "int4": 0.125}


def main(arguments: Sequence[str] | None = None) -> int:
    """Print all mistakes. Returns the exit status: MISTAKES if there are any, and otherwise 0."""
    parser = argparse.ArgumentParser(
        prog="carousel check", description="Find mistakes in a config or a model without starting the service."
    )
    parser.add_argument(
        "what", nargs="?", default=str(SERVE_YAML), metavar="MODEL or CONFIG", help="as for `carousel serve`"
    )
    what = parser.parse_args(arguments).what
    try:
        if is_config(what):
            file, mistakes = checked(Path(what), is_starting=False)
        else:
            mistakes = Mistakes()
            with mistakes.noted():
                check_given_model(what)
    except InvalidSetup as error:
        mistakes = Mistakes(str(error).splitlines())
    if mistakes:
        print(refusal(what, mistakes), file=sys.stderr)
        return MISTAKES
    if is_config(what):
        names = ", ".join(model.name for config in file.applications.values() for model in config.models)
        print(f"{what}: no mistakes found. It serves {names} on {file.host}:{file.port}.")
    else:
        print(f"{what}: no mistakes found.")
    return 0


def refusal(what: object, mistakes: Sequence[str]) -> str:
    """Return a message with one mistake per line."""
    count = f" ({len(mistakes)} mistakes)" if len(mistakes) > 1 else ""
    return "\n".join([f"{what} cannot be served{count}:", *mistakes])


def checked(path: Path, *, is_starting: bool = True) -> tuple[ServeFile, Mistakes]:
    """Read a Serve config file, and find all mistakes in the file and in its models and folders.

    With `is_starting`, the port must be free. `carousel check` omits this check, because the service may already be
    running. Raises InvalidSetup if the file is not a Serve config file.
    """
    file, mistakes = examined(path)
    if is_starting and not any(line.startswith("http_options") for line in mistakes):
        with mistakes.noted():
            check_port(file, path)
    for where, model in file.models:
        mistakes += mistakes_of_model(where, model) + _mistakes_of_folders(where, model)
    for name, config in file.applications.items():
        if config.batches is not None:
            at = place_in(name, file.applications)
            with mistakes.noted(f"{at}: batches.path" if at else "batches.path"):
                check_folder(config.batches.path)
    with mistakes.noted():
        check_memory(file)
    return file, mistakes


def check_given_model(what: str) -> None:
    """Check a model that is named without a config. Raises InvalidSetup for mistakes."""
    if not is_known(what):
        check_name(what)
        check_model(ModelConfig(path=what))


def _mistakes_of_folders(where: str, served: ServedModelConfig) -> Mistakes:
    mistakes, engine = Mistakes(), served.engine
    folders = {f"cache.tiers[{index}]": tier.path for index, tier in enumerate(engine.cache.tiers)}
    for setting, path in (folders | {"step_log": engine.step_log.path}).items():
        with mistakes.noted(f"{where}.engine.{setting}.path"):
            if path is not None:
                check_folder(path)
    return mistakes


def check_folder(path: str) -> None:
    """Raise InvalidSetup if the folder is missing and cannot be created, or if this user cannot write to it."""
    place = Path(os.path.expanduser(path)).absolute()
    nearest = next(each for each in (place, *place.parents) if os.path.exists(each))
    if not nearest.is_dir():
        raise InvalidSetup(f"got {path!r}; the folder cannot be created, because {nearest} is not a folder")
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise InvalidSetup(f"got {path!r}; this user may not write to {nearest}; choose another folder")


def check_port(config: ServeFile, path: Path) -> None:
    """Raise InvalidSetup if the service cannot listen on the config's host and port."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    with socket.socket(family) as probe:
        # The server also sets this option, so that connections of the last run that are still closing do not matter.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((config.host, config.port))
        except UnicodeError as error:
            raise InvalidSetup(f"http_options.host: got {config.host[:60]!r}, which is not a host name") from error
        except OSError as error:
            way_out = f"set another host or port in {path}, or --port"
            if error.errno == errno.EADDRINUSE:
                way_out = f"stop the process that `ss -ltnp 'sport = :{config.port}'` shows, or {way_out}"
            raise InvalidSetup(
                f"http_options: cannot listen on {config.host}:{config.port}: {error.strerror}; {way_out}"
            ) from error


def check_memory(file: ServeFile) -> None:
    """Raise InvalidSetup if the KV memory and weights of all CPU replicas exceed this machine's memory.

    The sum is a lower bound: autoscaling may add replicas, and a process also needs other memory.
    """
    parts = sorted(_least_bytes(file), key=lambda part: -part[1])
    largest = ", ".join(f"{name} {num_bytes / GIB:,.2f}" for name, num_bytes in parts)
    check_host_memory(
        "the replicas on CPUs need at least",
        sum(num_bytes for _, num_bytes in parts),
        "lower engine.cache.memory_gib or replicas.num_replicas, or set engine.model.quantization",
        detail=f" ({largest})",
    )


def _least_bytes(file: ServeFile) -> Iterator[tuple[str, int]]:
    """Yield (name, bytes) for each model's KV memory and weights. Replicas on one machine share their weights."""
    weights: dict[tuple[str, str], int] = {}
    for _, served in file.models:
        model, replicas = served.engine.model, served.replicas
        if model.simulated is not None or replicas.num_gpus or model.device == "cuda":
            continue
        if served.engine.cache.num_blocks is None:
            count = replicas.min_replicas
            yield f"KV memory of {served.name}", int(served.engine.cache.memory_gib * GIB * count)
        part = _LEFT.get(model.quantization, 0.5)
        weights[model.path, model.quantization] = int(weights_bytes(model.path) * part)
    yield from ((f"weights of {path}", num_bytes) for (path, _), num_bytes in weights.items())
