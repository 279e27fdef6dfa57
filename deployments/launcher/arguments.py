"""Parses the arguments of `carousel serve`, and explains the replacements for other servers' flags."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from app.errors import InvalidSetup
from deployments.serve.settings import SERVE_YAML

_CONFIGS = (".yaml", ".yml", ".json")
_OF_A_MODEL = "models[]."


class _Option(NamedTuple):
    """A command line option that overrides one setting of the config."""

    flag: str
    setting: str  # a dotted path in the config; `models[]` means its only model
    kind: type
    help: str


OPTIONS = (
    _Option("--host", "http_options.host", str, "address to listen on (default: 127.0.0.1); others need --api-keys"),
    _Option("--port", "http_options.port", int, "port to listen on (default: the config's port, or 8000)"),
    _Option("--served-model-name", "models[].name", str, "the name that clients send as `model`"),
    _Option(
        "--max-model-len", "models[].engine.model.max_model_len", int, "maximum tokens of prompt and output together"
    ),
    _Option("--dtype", "models[].engine.model.dtype", str, "auto, float32, bfloat16 or float16"),
    _Option("--quantization", "models[].engine.model.quantization", str, "none, int8, int4 or fp8"),
    _Option("--replicas", "models[].replicas.num_replicas", int, "number of the model's replicas"),
    _Option("--api-keys", "api.keys_file", str, "a file with API keys; `carousel key NAME` prints an entry"),
)

# Maps flags of vLLM, SGLang, llama.cpp and Ollama to their replacements here. Dotted names are settings in a config.
_MODEL = "pass the model as the argument: `carousel serve MODEL`"
_ALWAYS, _NEVER = "omit the flag: this is always on", "omit the flag: there is no such setting"
ANSWERS: Mapping[str, str] = {
    # vLLM
    "--model": _MODEL,
    "--model-path": _MODEL,
    "--tensor-parallel-size": "models[].replicas.tensor_parallel, with replicas.num_gpus: 1",
    "-tp": "models[].replicas.tensor_parallel, with replicas.num_gpus: 1",
    "--tp-size": "models[].replicas.tensor_parallel, with replicas.num_gpus: 1",
    "--pipeline-parallel-size": "models[].replicas.tensor_parallel: each layer is divided among the devices",
    "--data-parallel-size": "--replicas",
    "--dp-size": "--replicas",
    "--gpu-memory-utilization": "models[].engine.cache.gpu_memory_fraction",
    "--mem-fraction-static": "models[].engine.cache.gpu_memory_fraction",
    "--max-num-seqs": "models[].engine.scheduler.max_running",
    "--max-running-requests": "models[].engine.scheduler.max_running",
    "--max-num-batched-tokens": "models[].engine.scheduler.max_step_tokens",
    "--chunked-prefill-size": "models[].engine.scheduler.prefill_chunk_tokens",
    "--context-length": "--max-model-len",
    "--kv-cache-dtype": "models[].engine.cache.dtype",
    "--block-size": "models[].engine.cache.block_size",
    "--enable-prefix-caching": _ALWAYS,
    "--enable-chunked-prefill": _ALWAYS,
    "--enable-auto-tool-choice": _ALWAYS,
    "--tool-call-parser": "models[].tool_parser, if the chat template's format is not recognized",
    "--reasoning-parser": "omit the flag: the format is detected from the chat template",
    "--enable-lora": "models[].adapters: a folder for each name that clients send",
    "--lora-modules": "models[].adapters: a folder for each name that clients send",
    "--speculative-config": "models[].engine.speculation",
    "--enforce-eager": "models[].engine.model.backend: eager",
    "--revision": "models[].engine.model.revision",
    "--api-key": "--api-keys FILE: `carousel key NAME` prints an entry for the file",
    "--trust-remote-code": "omit the flag: code in a model's folder is never run",
    "--device": "models[].engine.model.device",
    "--load-format": _NEVER,
    "--seed": "`seed` in each request",
    # llama.cpp
    "-m": _MODEL,
    "-hf": "the hub id of the model's safetensors version: `carousel serve HUB/ID`",
    "--hf-repo": "the hub id of the model's safetensors version: `carousel serve HUB/ID`",
    "-c": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-ngl": "models[].engine.model.device: cuda, with replicas.num_gpus: 1; all layers are on one device",
    "--n-gpu-layers": "models[].engine.model.device: cuda, with replicas.num_gpus: 1; all layers are on one device",
    "-t": "models[].engine.model.num_threads",
    "--threads": "models[].engine.model.num_threads",
    "-np": "models[].engine.scheduler.max_running",
    "--parallel": "models[].engine.scheduler.max_running",
    "-b": "models[].engine.scheduler.max_step_tokens",
    "--batch-size": "models[].engine.scheduler.max_step_tokens",
    "-ctk": "models[].engine.cache.dtype: int8, for keys and values",
    "--cache-type-k": "models[].engine.cache.dtype: int8, for keys and values",
    "-md": "models[].engine.speculation: {method: draft_model, model: FILE.gguf}",
    "--model-draft": "models[].engine.speculation: {method: draft_model, model: FILE.gguf}",
    "-a": "--served-model-name",
    "--alias": "--served-model-name",
    "-fa": _ALWAYS,
    "--flash-attn": _ALWAYS,
    "-cb": _ALWAYS,
    "--cont-batching": _ALWAYS,
    "--jinja": _ALWAYS,
    "--no-mmap": _NEVER,
    "--mlock": _NEVER,
    "--mmproj": "omit the flag: only text is supported",
    "--embedding": "models[].pooling, if the model's files do not specify it",
    "--lora": "models[].adapters: a folder for each name that clients send",
    "--metrics": "omit the flag: `/metrics` is always served",
}


class Given(NamedTuple):
    """The parsed command line."""

    model: str | None  # None for the config's models
    config: Path
    changes: dict[str, Any]  # maps the paths in `OPTIONS` to new values
    dashboard: bool


def is_config(what: str) -> bool:
    """Return whether an argument has the suffix of a config file. All other arguments name a model."""
    return Path(what).suffix in _CONFIGS


def parsed(arguments: Sequence[str] | None, command: str, description: str) -> Given:
    """Parse the arguments. Exits with status 2 for unknown flags, and shows replacements for other servers' flags."""
    parser = argparse.ArgumentParser(prog=f"carousel {command}", description=description)
    parser.add_argument(
        "what", nargs="?", default=str(SERVE_YAML), metavar="MODEL or CONFIG",
        help="smollm2, gemma3, a model's folder, a GGUF file, or a hub id; or a Serve config file (.yaml, .json). "
        "Default: the bundled model with deployments/serve.yaml",
    )  # fmt: skip
    parser.add_argument("--config", type=Path, help="a config with one model, which is replaced by MODEL")
    for option in OPTIONS:
        metavar = option.flag.rpartition("-")[2].upper()
        parser.add_argument(option.flag, type=option.kind, metavar=metavar, help=option.help)
    parser.add_argument("--dashboard", action="store_true", help="start Ray's dashboard on 127.0.0.1:8265")
    if answers := list(_answers_to(arguments or ())):
        parser.error("\n".join(answers))
    given = parser.parse_args(arguments)
    changes = {option.setting: getattr(given, option.flag[2:].replace("-", "_")) for option in OPTIONS}
    changes = {setting: value for setting, value in changes.items() if value is not None}
    if is_config(given.what):
        if given.config is not None:
            parser.error(f"got two configs: {given.what} and --config {given.config}")
        return Given(None, Path(given.what), changes, given.dashboard)
    return Given(given.what, given.config or SERVE_YAML, changes, given.dashboard)


def _answers_to(arguments: Sequence[str]) -> Iterator[str]:
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag in ANSWERS:
            yield f"{flag} is not supported here. Instead: {ANSWERS[flag]}"


def change(document: dict[str, Any], changes: Mapping[str, Any]) -> None:
    """Apply `changes` to a parsed config. Raises InvalidSetup for a model's setting unless there is one model."""
    for setting, value in changes.items():
        place = document if setting.startswith("http_options.") else _only_args(document)
        path = setting
        if setting.startswith(_OF_A_MODEL):
            path = setting.removeprefix(_OF_A_MODEL)
            models = place.get("models") or []
            if not isinstance(models, list) or len(models) != 1 or not isinstance(models[0], dict):
                flag = next((option.flag for option in OPTIONS if option.setting == setting), "a MODEL")
                count = len(models) if isinstance(models, list) else 0
                raise InvalidSetup(f"{flag}: the config has {count} models, not one; set it in the config instead")
            [place] = models
        *branches, name = path.split(".")
        for branch in branches:
            if place.get(branch) is None:  # the branch is absent, or empty in the file
                place[branch] = {}
            place = place[branch]
            if not isinstance(place, dict):
                raise InvalidSetup(f"{branch}: got {str(place)[:60]!r}; must map names to settings")
        place[name] = value


def _only_args(document: dict[str, Any]) -> dict[str, Any]:
    applications = document.get("applications") or []
    is_list = isinstance(applications, list) and all(isinstance(each, dict) for each in applications)
    if not is_list or len(applications) != 1 or not isinstance(applications[0].get("args"), dict):
        raise InvalidSetup("command line options require a config with one application that has `args`")
    args: dict[str, Any] = applications[0]["args"]
    return args
