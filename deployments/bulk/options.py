"""The command line of a bulk run. No Ray here: mistakes are reported at once."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import ServedModelConfig
from app.errors import InvalidSetup
from app.jobs.items import RowSettings
from app.jobs.remote_run import ServiceSettings
from app.model.location import resolve_model_path
from deployments.cli import positive
from deployments.serve.settings import parse, read_serve_file

DEFAULT_PORT = 8000  # as in deployments/serve.yaml
DEFAULT_MAX_IN_FLIGHT = 1024
DEFAULT_PATIENCE_S = 600.0
API_KEY_VARIABLE = "CAROUSEL_API_KEY"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Engines of the run's own."""

    served: ServedModelConfig

    @property
    def is_local_model(self) -> bool:
        paths = self.served.engine.model_paths.values()
        return all(resolve_model_path(path) != path or Path(path).is_dir() for path in paths)


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A checked command line."""

    input: str
    output: Path
    output_format: str  # jsonl, parquet
    through: PoolSettings | ServiceSettings
    rows: RowSettings
    resume: bool
    fail_on_row_errors: bool

    def description(self) -> dict[str, Any]:
        """What the answers depend on: a resumed run must have the same. Neither how many engines there are nor where
        the service listens is among it."""
        return _model_of(self.through) | {
            "prompt_column": self.rows.prompt_column,
            "messages_column": self.rows.messages_column,
            "max_tokens": self.rows.max_tokens,
            "temperature": self.rows.temperature,
            "format": self.output_format,
        }


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """Raises InvalidSetup for what is wrong in the config file; argparse reports the rest, with status 2."""
    parser = _parser()
    given = parser.parse_args(arguments)
    _check_they_go_together(parser, given)
    return Options(
        input=given.input,
        output=given.output,
        output_format=given.format,
        through=_pool(given) if given.through == "pool" else _service(given),
        rows=RowSettings(
            prompt_column=given.prompt_column,
            messages_column=given.messages_column,
            max_tokens=given.max_tokens,
            temperature=given.temperature,
        ),
        resume=given.resume,
        fail_on_row_errors=given.fail_on_row_errors,
    )


def _model_of(through: PoolSettings | ServiceSettings) -> dict[str, Any]:
    if isinstance(through, ServiceSettings):
        return {"through": "fleet", "model_name": through.model}
    model = through.served.engine.model
    kv_dtype = through.served.engine.cache.dtype
    quantization = {} if model.quantization == "none" else {"quantization": model.quantization}
    return (
        quantization
        | ({} if kv_dtype == "auto" else {"kv_dtype": kv_dtype})
        | {
            "through": "pool",
            "model": model.path,
            "model_name": through.served.name,
            "revision": model.revision,
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
        }
    )


def _check_they_go_together(parser: argparse.ArgumentParser, given: argparse.Namespace) -> None:
    names = ("engines",) if given.through == "fleet" else ("base_url", "api_key", "max_in_flight", "wait_for_service")
    for name in names:
        if getattr(given, name) is not None:
            parser.error(f"--{name.replace('_', '-')} means nothing with --through {given.through}")


def _pool(given: argparse.Namespace) -> PoolSettings:
    served = _served(given.config, given.model)
    if given.engines is not None:
        replicas = served.replicas.model_copy(update={"num_replicas": given.engines})
        served = served.model_copy(update={"replicas": replicas})
    return PoolSettings(served=served)


def _service(given: argparse.Namespace) -> ServiceSettings:
    port = DEFAULT_PORT if given.config is None else read_serve_file(given.config).port
    return ServiceSettings(
        base_url=given.base_url or f"http://127.0.0.1:{port}",
        api_key=given.api_key or os.environ.get(API_KEY_VARIABLE),
        model=given.model,
        max_in_flight=given.max_in_flight or DEFAULT_MAX_IN_FLIGHT,
        patience_s=given.wait_for_service or DEFAULT_PATIENCE_S,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="carousel bulk", description="Answer every row of some files.")
    parser.add_argument("--input", required=True, metavar="FILE", help="JSONL or Parquet: a file, folder, glob or URI")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="the run's own folder")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl", help="of the results")
    parser.add_argument(
        "--through",
        choices=("pool", "fleet"),
        default="pool",
        help="engines of its own, or a running service's idle slots",
    )
    parser.add_argument(
        "--model", metavar="MODEL", help="a model of --config by its name, a folder, or a hub id; fleet: a served model"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a Serve config file: engine, engines, devices, port"
    )
    parser.add_argument("--engines", type=positive, metavar="N", help="pool: instead of the config's num_replicas")
    parser.add_argument(
        "--base-url", metavar="URL", help=f"fleet: the service; default: this machine, port {DEFAULT_PORT}"
    )
    parser.add_argument("--api-key", metavar="KEY", help=f"fleet; others cannot read it in ${API_KEY_VARIABLE}")
    parser.add_argument(
        "--max-in-flight", type=positive, metavar="N", help=f"fleet: rows at once, at most {DEFAULT_MAX_IN_FLIGHT:,}"
    )
    parser.add_argument(
        "--wait-for-service", type=positive, metavar="S",
        help=f"fleet: seconds until a service that does not answer is given up; default {DEFAULT_PATIENCE_S:g}",
    )  # fmt: skip
    columns = parser.add_mutually_exclusive_group()
    columns.add_argument("--prompt-column", metavar="NAME", help="text to go on with, as /v1/completions does")
    columns.add_argument("--messages-column", metavar="NAME", help="a list of messages, or the text of a user's turn")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="where a row does not say")
    parser.add_argument("--temperature", type=_temperature, metavar="T", help="where a row does not say; 0 is greedy")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")
    parser.add_argument("--fail-on-row-errors", action="store_true", help="exit with 3 when any row failed")
    return parser


def _served(config: Path | None, model: str | None) -> ServedModelConfig:
    """The model to run."""
    applications = [parse({})] if config is None else list(read_serve_file(config).applications.values())
    models = {served.name: served for application in applications for served in application.models}
    if model in models:
        return models[model]
    if model is None and len(models) > 1:
        raise InvalidSetup(f"{config}: has the models {', '.join(models)}; choose one with --model")
    first = next(iter(models.values()))
    if model is None:
        return first
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().exists():
        raise InvalidSetup(f"--model {model}: there is no such folder or file")
    engine = first.engine.model_copy(update={"model": first.engine.model.model_copy(update={"path": model})})
    return first.model_copy(update={"name": model, "engine": engine})


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"got {value:g}; must be from 0 to 2")
    return value
