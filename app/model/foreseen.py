"""Finds mistakes in a model's path and files before the model is loaded. Does not write files or import torch."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.config import ModelConfig
from app.errors import InvalidSetup, UnsupportedModel, first_line
from app.model.description import max_model_len, read_config
from app.model.location import existing_place, is_a_path

# Model types with recurrent layers for which `recurrence.py` has no operator, and the names of these layers.
UNSUPPORTED_RECURRENCES = {
    "bailing_hybrid": "Kimi Delta Attention (KDA)",
    "kimi_linear": "Kimi Delta Attention (KDA)",
    "minimax": "lightning attention",
    "recurrent_gemma": "the RG-LRU of Griffin",
    "rwkv": "the time mixing of RWKV",
    "xlstm": "the matrix memory of xLSTM",
    "zaya": "Compressed Convolutional Attention (CCA)",
}
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_OTHER_TYPES = ("gpt-sw3",)  # model types that transformers registers outside its table
_LENGTHS = ("max_position_embeddings", "n_positions")


def weights_bytes(path: str) -> int:
    """Return the bytes of a model's weight files, or 0 for a hub id, whose files may not be downloaded yet."""
    place = existing_place(path)
    if place is None:
        return 0
    return sum(each.stat().st_size for each in _weight_files(place))


def _numbers_in(name: str) -> list[str]:
    return re.findall(r"\d+", name)


def check_model(config: ModelConfig) -> None:
    """Check the files of a local model. For a hub id, only the path itself is checked, without network access.

    Raises InvalidSetup, which names the file and the fix, if the path does not exist, the files contain no model, or
    the configured context is longer than the model's. Raises UnsupportedModel if the model cannot be served.
    """
    check_path(config.path)
    place = existing_place(config.path)
    if place is not None and place.is_file():
        _check_gguf(place)
    elif place is not None:
        _check_folder(config, place)


def check_path(path: str) -> None:
    """Raise InvalidSetup if a path is neither an existing folder or file nor a hub id, or if it looks like a typo.

    A hub id looks like a typo if a local model in the same folder has nearly the same name.
    """
    if existing_place(path) is not None:
        return
    near = _similar_model(Path(os.path.expanduser(path)))
    hint = f"; did you mean {near!r}?" if near else ""
    if is_a_path(path) or path.endswith(".gguf") or (near and not _is_in_hub_cache(path)):
        raise InvalidSetup(f"got {path!r}; there is no such folder or file here{hint}")
    if not _HUB_ID.fullmatch(path):
        raise InvalidSetup(f"got {path!r}; there is no such folder here, and hub ids look like Qwen/Qwen3-0.6B")


def check_hub_is_reachable(path: str) -> None:
    """Raise InvalidSetup if a hub id was never downloaded and the hub cannot be reached. Sends one request.

    A download would send six requests for each file, over 23 seconds. Does not check whether the hub has the model.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    file = "config.json"
    if existing_place(path) is not None or not _HUB_ID.fullmatch(path):
        return
    try:
        if not try_to_load_from_cache(path, file):
            get_hf_file_metadata(hf_hub_url(path, file))
    except HFValidationError as error:
        raise InvalidSetup(f"got {path!r}; there is no such folder here, and it is not a hub id: {error}") from error
    except HfHubHTTPError:  # the hub responded, so it can be reached
        return
    except Exception as error:  # the error's class depends on the version of huggingface_hub
        raise InvalidSetup(
            f"{path!r} is not a folder here and was never downloaded, and the model hub cannot be reached: "
            f"{first_line(error).rstrip('.')}. Set the path of a folder, or connect this machine to the hub"
        ) from error


def _is_in_hub_cache(path: str) -> bool:
    from huggingface_hub.constants import HF_HUB_CACHE

    return (Path(HF_HUB_CACHE) / f"models--{path.replace('/', '--')}").is_dir()


def _similar_model(place: Path) -> str | None:
    """Return the path of a model in the same folder with nearly the same name, or None if there is none."""
    try:
        beside = [each.name for each in place.parent.iterdir() if _is_model(each)]
    except OSError:
        return None
    # Skip names that differ in a number: they belong to models of other sizes or versions, not to typos.
    beside = [name for name in beside if _numbers_in(name) == _numbers_in(place.name)]
    close = difflib.get_close_matches(place.name, beside, n=1, cutoff=0.85)
    return str(place.with_name(close[0])) if close else None


def _is_model(place: Path) -> bool:
    return place.suffix == ".gguf" or (place / "config.json").is_file()


def _check_gguf(place: Path) -> None:
    from app.model.gguf.families import check_architecture
    from app.model.gguf.reader import GgufFile

    check_architecture(GgufFile(place.absolute()))


def _check_folder(config: ModelConfig, folder: Path) -> None:
    described = read_config(config, str(folder))
    inner, kind = described.get("text_config"), described.get("model_type")
    text: dict[str, Any] = inner if isinstance(inner, dict) else described
    if kind is not None and not isinstance(kind, str):
        raise InvalidSetup(f"{folder}/config.json: model_type is {str(kind)[:60]}; it should be a name")
    if kind in UNSUPPORTED_RECURRENCES:
        raise UnsupportedModel(f"{folder} is a {kind} model; {UNSUPPORTED_RECURRENCES[kind]} is not supported")
    known = _known_types()
    if kind is not None and known and kind not in known:
        close = difflib.get_close_matches(str(kind), known, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else "; a newer version may support it"
        raise UnsupportedModel(
            f"{folder}/config.json: model_type {kind!r} is unknown to the installed transformers{hint}"
        )
    limit = next((text[name] for name in _LENGTHS if isinstance(text.get(name), int)), None)
    if limit is not None:
        max_model_len(config, limit)
    if not any(_weight_files(folder)):
        others = sorted(each.name for each in folder.glob("*.bin"))
        what = f"only safetensors files are supported, not {others[0]}" if others else "there is no model*.safetensors"
        raise InvalidSetup(f"{folder} has no weights: {what}")
    if not any(folder.glob("token*")) and not (folder / "vocab.json").is_file():
        raise InvalidSetup(f"{folder} has no tokenizer: there is no tokenizer.json")


def _weight_files(place: Path) -> Iterator[Path]:
    yield from [place] if place.is_file() else place.glob("model*.safetensors")


def _known_types() -> list[str]:
    """Return the model types that the installed transformers supports, or none if their table has moved since 5.23.

    Loads only the table's module, because importing all of transformers takes seconds and imports torch.
    """
    found = importlib.util.find_spec("transformers")
    assert found is not None, "transformers is installed"
    path = Path(str(found.origin)).parent / "models" / "auto" / "auto_mappings.py"
    if not path.is_file():
        return []
    spec = importlib.util.spec_from_file_location("auto_mappings_alone", path)
    assert spec is not None, "the table is a module"
    module = importlib.util.module_from_spec(spec)
    assert spec.loader is not None, "the table is in a file"
    spec.loader.exec_module(module)
    return [*getattr(module, "CONFIG_MAPPING_NAMES", ()), *_OTHER_TYPES]
