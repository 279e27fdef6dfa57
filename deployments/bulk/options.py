"""The command line of a bulk run. No Ray here: mistakes are told at once."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.assembly import resolve_model_path
from app.bulk.rows import RowSettings
from app.config import ApiConfig, ServedModelConfig
from app.errors import InvalidSetup
from deployments.settings import parse, read_serve_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A checked command line."""

    input: str
    output: Path
    output_format: str  # jsonl, parquet
    served: ServedModelConfig
    limits: ApiConfig
    rows: RowSettings
    resume: bool
    fail_on_row_errors: bool

    @property
    def is_local_model(self) -> bool:
        path = self.served.engine.model.path
        return resolve_model_path(path) != path or Path(path).is_dir()

    def description(self) -> dict[str, Any]:
        """What the answers depend on: a resumed run must have the same. How many engines there are is not among it."""
        model = self.served.engine.model
        return {
            "model": model.path,
            "model_name": self.served.name,
            "revision": model.revision,
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
            "prompt_column": self.rows.prompt_column,
            "messages_column": self.rows.messages_column,
            "max_tokens": self.rows.max_tokens,
            "temperature": self.rows.temperature,
            "format": self.output_format,
        }


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """Raises InvalidSetup for what is wrong in the config file; argparse answers for the rest, with status 2."""
    given = _parser().parse_args(arguments)
    served, limits = _served(given.config, given.model)
    if given.engines is not None:
        replicas = served.replicas.model_copy(update={"num_replicas": given.engines})
        served = served.model_copy(update={"replicas": replicas})
    return Options(
        input=given.input,
        output=given.output,
        output_format=given.format,
        served=served,
        limits=limits,
        rows=RowSettings(
            prompt_column=given.prompt_column,
            messages_column=given.messages_column,
            max_tokens=given.max_tokens,
            temperature=given.temperature,
        ),
        resume=given.resume,
        fail_on_row_errors=given.fail_on_row_errors,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m deployments.bulk", description="Answer every row of some files.")
    parser.add_argument("--input", required=True, metavar="FILE", help="JSONL or Parquet: a file, folder, glob or URI")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="the run's own folder")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl", help="of the results")
    parser.add_argument("--model", metavar="MODEL", help="a model of --config by its name, a folder, or a hub id")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a Serve config file: engine, engines, devices")
    parser.add_argument("--engines", type=_positive, metavar="N", help="instead of the config's num_replicas")
    columns = parser.add_mutually_exclusive_group()
    columns.add_argument("--prompt-column", metavar="NAME", help="text to go on with, as /v1/completions does")
    columns.add_argument("--messages-column", metavar="NAME", help="a list of messages, or the text of a user's turn")
    parser.add_argument("--max-tokens", type=_positive, metavar="N", help="where a row does not say")
    parser.add_argument("--temperature", type=_temperature, metavar="T", help="where a row does not say; 0 is greedy")
    parser.add_argument("--resume", action="store_true", help="go on with a run that was interrupted")
    parser.add_argument("--fail-on-row-errors", action="store_true", help="exit with 3 when any row failed")
    return parser


def _served(config: Path | None, model: str | None) -> tuple[ServedModelConfig, ApiConfig]:
    """The model to run and the limits of a row's fields."""
    applications = [parse({})] if config is None else list(read_serve_file(config).applications.values())
    limits = applications[0].api
    models = {served.name: served for application in applications for served in application.models}
    if model in models:
        return models[model], limits
    if model is None and len(models) > 1:
        raise InvalidSetup(f"{config}: has the models {', '.join(models)}; choose one with --model")
    first = next(iter(models.values()))
    if model is None:
        return first, limits
    if model.startswith(("/", ".", "~")) and not Path(model).expanduser().is_dir():
        raise InvalidSetup(f"--model {model}: there is no such folder")
    engine = first.engine.model_copy(update={"model": first.engine.model.model_copy(update={"path": model})})
    return first.model_copy(update={"name": model, "engine": engine}), limits


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}; must be at least 1")
    return value


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"got {value:g}; must be from 0 to 2")
    return value
