"""Parses the command line of a bulk run. Does not import Ray, so that mistakes are reported immediately."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.config import ServedModelConfig
from app.errors import InvalidSetup
from app.jobs.items import RowSettings
from app.model.location import is_local
from deployments.cli import positive
from deployments.launcher.trial import named_model
from deployments.serve.settings import mistakes_of_model, parse, read_serve_file


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """A validated command line."""

    input: str
    output: Path
    output_format: str  # jsonl, parquet
    served: ServedModelConfig
    rows: RowSettings
    resume: bool
    fail_on_row_errors: bool

    @property
    def is_local_model(self) -> bool:
        return all(map(is_local, self.served.engine.model_paths.values()))

    def description(self) -> dict[str, Any]:
        """Return the settings that determine the answers. They must not change when a run is resumed."""
        return _model_of(self.served) | asdict(self.rows) | {"format": self.output_format}


def read_options(arguments: Sequence[str] | None = None) -> Options:
    """Parse the command line. Raises InvalidSetup for mistakes in the config; argparse exits with 2 for others."""
    given = _parser().parse_args(arguments)
    served = _served(given.config, given.model)
    if given.engines is not None:
        served = served.with_setting("replicas.num_replicas", given.engines)
    return Options(
        input=given.input,
        output=given.output,
        output_format=given.format,
        served=served,
        rows=RowSettings(
            prompt_column=given.prompt_column,
            messages_column=given.messages_column,
            max_tokens=given.max_tokens,
            temperature=given.temperature,
        ),
        resume=given.resume,
        fail_on_row_errors=given.fail_on_row_errors,
    )


def _model_of(served: ServedModelConfig) -> dict[str, Any]:
    model = served.engine.model
    kv_dtype = served.engine.cache.dtype
    quantization = {} if model.quantization == "none" else {"quantization": model.quantization}
    return (
        quantization
        | ({} if kv_dtype == "auto" else {"kv_dtype": kv_dtype})
        | ({} if served.pooling == "auto" else {"pooling": served.pooling})
        | {
            "through": "pool",  # earlier versions stored this field; their runs can be resumed
            "model": model.path,
            "model_name": served.name,
            "revision": model.revision,
            "dtype": model.dtype,
            "max_model_len": model.max_model_len,
        }
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="carousel bulk", description="Answer every row of one or more files.")
    parser.add_argument(
        "--input", required=True, metavar="FILE", help="JSONL, CSV or Parquet: a file, folder, glob or URI"
    )
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a new folder for this run")
    parser.add_argument("--format", choices=("jsonl", "parquet"), default="jsonl", help="format of the results")
    parser.add_argument("--model", metavar="MODEL", help="the name of a model in --config, a folder, or a hub id")
    parser.add_argument("--config", type=Path, metavar="FILE", help="a Serve config file with the model's settings")
    parser.add_argument("--engines", type=positive, metavar="N", help="number of engines; default: num_replicas")
    columns = parser.add_mutually_exclusive_group()
    columns.add_argument("--prompt-column", metavar="NAME", help="column with prompts, as for /v1/completions")
    columns.add_argument("--messages-column", metavar="NAME", help="column with lists of messages or users' texts")
    parser.add_argument(
        "--max-tokens", type=positive, metavar="N", help="maximum output tokens for rows without max_tokens"
    )
    parser.add_argument(
        "--temperature", type=_temperature, metavar="T", help="temperature for rows without one; 0 is greedy"
    )
    parser.add_argument("--resume", action="store_true", help="resume an interrupted run")
    parser.add_argument(
        "--fail-on-row-errors", action="store_true", help="exit with 3 if any row failed, not only if all failed"
    )
    return parser


def _served(config: Path | None, model: str | None) -> ServedModelConfig:
    """Return the model to run. Raises InvalidSetup for mistakes in its files, or if `model` is None and there are
    several models."""
    found = [("models[0]", parse({}).models[0])] if config is None else read_serve_file(config).models
    models = {served.name: (where, served) for where, served in found}
    if model is None and len(models) > 1:
        raise InvalidSetup(f"{config} defines several models ({', '.join(models)}); choose one with --model")
    where, served = models.get(model or "", found[0])
    # Rows use the model itself, and they rarely repeat: KV blocks would be written to a tier but never read again.
    served = served.with_setting("adapters", {}).with_setting("engine.cache.tiers", ())
    if model is not None and model not in models:
        served = served.with_setting("name", model).with_setting("engine.model.path", named_model(model))
    if mistakes := mistakes_of_model(where, served, are_all_here="RAY_ADDRESS" not in os.environ):
        raise InvalidSetup("\n".join(mistakes))
    return served


def _temperature(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"got {value:g}; must be from 0 to 2")
    return value
