"""Determines which kind of model the files contain, and creates transformers' module from them."""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import torch

from app.config import ModelConfig
from app.errors import CarouselError, InvalidSetup, UnsupportedModel, first_line
from app.model.attention import ATTENTION_NAME, UnknownAttention, number_layers, paged_attention
from app.model.cpu.checkpoint import Checkpoint, MappedModel
from app.model.cpu.gguf_checkpoint import GgufCheckpoint
from app.model.cpu.stored_matrix import can_be_stored
from app.model.cpu.weights import why_not_native
from app.model.cuda.attention import TritonAttention
from app.model.description import read_config
from app.model.foreseen import UNSUPPORTED_RECURRENCES
from app.model.gguf.manifest import Manifest, manifest_in
from app.model.gpu_backends import BackendFailed
from app.model.language_model import language_class, language_config, plain_names
from app.model.latent_attention import store_latents
from app.model.llama import why_not_llama_like
from app.model.memory import is_out_of_memory
from app.model.parallel.split_plan import SplitPlan, check_divisible, shared_numbers
from app.model.positions import fix_positions
from app.model.quantised_checkpoint import Quantised, loading_options
from app.model.recurrent_layers import use_slots
from app.model.verification import Reference
from app.progress import download_bar, step_within

if TYPE_CHECKING:  # transformers imports more slowly than torch, and a model that was verified earlier does not need it
    from transformers import PreTrainedConfig, PreTrainedModel

    from app.model.parallel.group import RankGroup

logger = logging.getLogger(__name__)

LAYERS_WITH_STATES = frozenset({"conv", "linear_attention", "mamba", "hybrid"})  # see `recurrent_layers`
_SERVABLE_LAYERS = LAYERS_WITH_STATES | {"full_attention", "sliding_attention", "attention", "mlp", "moe"}

_OTHER_LAYERS = {
    "hybrid_sliding": "attention adds relative positions to its scores, and short convolutions change its inputs",
    "indexed_attention": "an indexer selects the tokens that a token attends to",
    "compressed_sparse_attention": "several tokens share one compressed key and value",
    "heavily_compressed_attention": "several tokens share one compressed key and value",
}


def reason_of(error: BaseException) -> str:
    """Describe in one line why loading or running a model has failed, and which line of code raised the error."""
    if isinstance(error, UnknownAttention):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__qualname__} at {PurePath(frame.filename).name}:{frame.lineno}: {first_line(error)}"


@contextmanager
def unsupported_if_fails(path: str, group: RankGroup | None = None) -> Iterator[None]:
    """Wrap code that inspects or loads a model. Turns unexpected errors into UnsupportedModel.

    CarouselError, BackendFailed and failures of the machine are raised unchanged.
    path: the model's path, for the message. group: the ranks that load the model together.
    """
    try:
        yield
    except (CarouselError, BackendFailed):
        raise
    except Exception as error:
        if _is_of_machine(error) or (group is not None and isinstance(error, RuntimeError)):
            raise  # `Ranks` determines which rank failed first
        raise UnsupportedModel(f"{path} cannot be loaded: {reason_of(error)}") from error


def _is_of_machine(error: Exception) -> bool:
    """Return whether the machine has failed or lacks memory, so that the model is not to blame."""
    return isinstance(error, MemoryError) or is_out_of_memory(error) or "CUDA error" in str(error)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model's files are, and the settings with which it is loaded."""

    config: ModelConfig
    location: str  # a folder or hub id
    device: torch.device  # meta to determine sizes only
    dtype: torch.dtype
    block_size: int = 16  # tokens per KV block; native code does not support all sizes
    cache: Path | None = None  # for records of verified models, and locks of shared weights
    group: RankGroup | None = None  # the ranks among which the model is split

    @cached_property
    def whole(self) -> PreTrainedConfig:
        """transformers' configuration of the whole checkpoint. Raises like `config_of_transformers`."""
        return config_of_transformers(self.config, self.location)

    @cached_property
    def found(self) -> PreTrainedConfig:
        """transformers' configuration of the language model. Also registers our attention with transformers.

        Raises:
            InvalidSetup: the model does not exist.
            UnsupportedModel: the configuration alone shows that the model cannot be served.
        """
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        path, found = self.config.path, language_config(self.whole)
        name = found.model_type
        try:
            language_class(found)
        except ValueError as error:
            raise UnsupportedModel(f"{path} ({name}) {error}") from error
        if name in UNSUPPORTED_RECURRENCES:
            raise UnsupportedModel(f"{path} ({name}) {unsupported_recurrence(UNSUPPORTED_RECURRENCES[name])}")
        kinds = [
            f"{kind} ({_OTHER_LAYERS[kind]})" if kind in _OTHER_LAYERS else kind
            for kind in sorted(_layer_types(found) - _SERVABLE_LAYERS)
        ]
        if kinds:
            raise UnsupportedModel(f"{path} ({name}) has layers without paged attention: {', '.join(kinds)}")
        return found

    @property
    def layers_with_states(self) -> frozenset[str]:
        """The types of the model's recurrent layers, which store one state for a whole sequence."""
        return LAYERS_WITH_STATES.intersection(_layer_types(self.found))

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """transformers' class for the language model."""
        return language_class(self.found)

    @cached_property
    def quantised(self) -> Quantised | None:
        """How config.json describes quantised weights, or None if the weights are not quantised."""
        return Quantised.of(read_config(self.config, self.location))

    @cached_property
    def folder(self) -> Path | None:
        """The folder with the files, which are downloaded if the location is a hub id.

        None if the download fails. transformers then reports the reason.
        """
        if Path(self.location).is_dir():
            return Path(self.location)
        from transformers.utils.hub import snapshot_download

        try:
            files, options = ["*.json", "model*.safetensors"], {"revision": self.config.revision}
            with step_within("downloading"):
                found = snapshot_download(self.location, allow_patterns=files, tqdm_class=download_bar(), **options)
            return Path(found)
        except (OSError, ValueError) as error:
            logger.info("%s cannot be downloaded as a whole: %s", self.config.path, first_line(error))
            return None

    def checkpoint(self, folder: Path) -> Checkpoint:
        """Open the folder's safetensors files, or the GGUF file behind it. Raises OSError if a file cannot be read."""
        if self.gguf is not None:
            return GgufCheckpoint(folder, self.dtype, self.gguf)
        return Checkpoint(folder, self.dtype, self.quantised)

    def weights_of_gguf(self) -> dict[str, torch.Tensor] | None:
        """Return all weights of a GGUF file, dequantised, or None if the model is not a GGUF file."""
        if self.gguf is None:
            return None
        self.log_gguf(is_kept=False)
        return GgufCheckpoint(Path(self.location), self.dtype, self.gguf).all()

    @cached_property
    def gguf(self) -> Manifest | None:
        """Where the weights are in the GGUF files, or None if the model is not a GGUF file."""
        return manifest_in(Path(self.location)) if Path(self.location).is_dir() else None

    def log_gguf(self, *, is_kept: bool) -> None:
        """Log the types in which a GGUF file's weights are served. Does nothing for other models.

        is_kept: whether matrices keep the file's types if the C++ code supports these.
        """
        if (manifest := self.gguf) is None:
            return
        counts = Counter(each.kind for placed in manifest.weights.values() for each in placed)
        kept: list[str] = []
        others: list[str] = []
        for kind, count in counts.most_common():
            (kept if is_kept and can_be_stored(kind) else others).append(f"{count} in {manifest.kinds[str(kind)]}")
        if kept:
            logger.info("%s: its weights keep the types of the file (%s)", self.config.path, ", ".join(kept))
        logger.info("%s: its weights are read as %s (%s)", self.config.path, self.dtype, ", ".join(others) or "none")

    def log_multiplied_out(self) -> None:
        """Log that quantised weights are dequantised, if there are any. GGUF files are logged by `log_gguf`."""
        if self.quantised is None:
            return
        packing, hint = self.quantised.packing, ""
        if packing is not None and self.device.type == "cpu" and self.config.quantization == "none":
            bits = max(packing.bits, 4)
            hint = f"; set model.quantization: int{bits} to save memory and time by packing them in {bits} bits again"
        name = self.quantised.method if packing is None else packing
        logger.info(
            "%s: its weights, quantised by %s, are multiplied out to %s%s", self.location, name, self.dtype, hint
        )

    def check_ranks(self, size: int) -> None:
        """Raise InvalidSetup, with the reason, if `size` ranks cannot share the model. Does not read weights."""
        if self.quantised is not None:
            raise InvalidSetup(
                f"replicas.tensor_parallel: got {size}; a quantised checkpoint cannot be split among ranks. Serve the "
                f"unquantised checkpoint (on GPUs, model.quantization: fp8 may quantise it), or set "
                f"replicas.tensor_parallel to 1"
            )
        if self.layers_with_states:
            raise InvalidSetup(
                f"replicas.tensor_parallel: got {size}; {self.config.path} has recurrent layers "
                f"({', '.join(sorted(self.layers_with_states))}), which cannot be split among ranks. Set it to 1"
            )
        check_divisible(shared_numbers(self.found), size, of=self.config.path)


def unsupported_recurrence(recurrence: str) -> str:
    """Return the predicate of the error message for a model with this unsupported recurrence."""
    return (
        f"has recurrent layers that are not supported: {recurrence}. Short convolutions, the gated delta rule, "
        f"Mamba 1 and Mamba 2 are supported"
    )


def _layer_types(found: PreTrainedConfig) -> set[str]:
    text = found.get_text_config()
    return {*(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())}


def config_of_transformers(config: ModelConfig, location: str) -> PreTrainedConfig:
    """Load a configuration. Raises InvalidSetup if there is none, or UnsupportedModel for encoder-decoder models."""
    from transformers import AutoConfig

    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            location, revision=config.revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise InvalidSetup(
            f"model.path {config.path!r} cannot be loaded as a folder or as a hub id "
            f"(looked at {location!r}): {first_line(error)}"
        ) from error
    if getattr(found, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{config.path} is an unsupported encoder-decoder model ({found.model_type})")
    return found


def pretrained(
    kind: Any,
    settings: ModelConfig,
    location: str | None,
    *,
    dtype: torch.dtype,
    attention: str,
    unused: tuple[str, ...] = (),
    **options: Any,
) -> PreTrainedModel:
    """Load a module with a transformers class, only from safetensors. Never runs code from the repository.

    location: None if `options` contains all weights.
    unused: prefixes of weights that the files may lack.

    Raises ValueError if the files lack any other weight, which transformers would initialise at random, and
    transformers' own errors.
    """
    module: PreTrainedModel
    with _without_report():
        module, report = kind.from_pretrained(
            location, revision=settings.revision, dtype=dtype, attn_implementation=attention, use_safetensors=True,
            trust_remote_code=False, output_loading_info=True, **options,
        )  # fmt: skip
    if missing := sorted(key for key in report["missing_keys"] if not key.startswith(unused)):
        raise ValueError(f"its files lack {len(missing)} weights, such as {missing[0]}")
    return module.eval()


@contextmanager
def _without_report() -> Iterator[None]:
    """Silence transformers' report of unused weights, which would list those of image towers."""
    log = logging.getLogger("transformers.modeling_utils")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def module_without_weights(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """Build transformers' model on the meta device, adapted to paged attention and states in slots."""
    with torch.device("meta"):
        module = _with_our_attention(
            lambda name: source.model_class._from_config(source.found, dtype=dtype, attn_implementation=name)
        )
    adapt(source, module)
    _read_generation_config(source, module)
    return module.eval()


def _read_generation_config(source: ModelSource, module: PreTrainedModel) -> None:
    from transformers import GenerationConfig

    if (Path(source.location) / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(source.location)


def _with_our_attention(make: Callable[[str], PreTrainedModel]) -> PreTrainedModel:
    """Return the module that `make` builds with our attention, or with "eager" if the model's code rejects ours.

    Such code looks up attention functions in its own table, see `own_attention`. make: receives the name of an
    attention function.
    """
    try:
        return make(ATTENTION_NAME)
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        return make("eager")


def mapped_model(source: ModelSource, device: torch.device | None = None) -> MappedModel | None:
    """Map the weights of a Llama-like model, or of this rank's part of it, from files in a folder.

    device: the device to copy weights to. None leaves them mapped, for models that the C++ decoder may support.

    Returns None if transformers must load the model instead: because it is not Llama-like, because transformers changes
    its weights when it reads them, or because files are missing or damaged, which transformers will then report.
    """
    folder, quantised = source.folder, source.quantised
    if folder is None or (quantised is not None and not quantised.has_scales):
        return None
    module = module_without_weights(source, source.dtype)
    if (why_not_native(module) if device is None else why_not_llama_like(module, "cuda")) is not None:
        return None
    try:
        checkpoint = source.checkpoint(folder)
    except OSError:
        return None
    if not checkpoint.has_weights_of(module):
        return None
    source.log_multiplied_out()
    if device is not None:
        source.log_gguf(is_kept=False)
    if source.group is None:
        return MappedModel(module, checkpoint, device)
    SplitPlan(module, source.group, path=source.config.path).split("", module)
    return MappedModel(module, checkpoint, device, rank=source.group.rank)


def read_module(source: ModelSource) -> PreTrainedModel:
    """Load transformers' model onto the device, with positions that do not depend on other tokens in a step.

    On a GPU, weights that need no change are copied directly from the files. Otherwise the whole model passes through
    host memory, because transformers needs `accelerate` to avoid that.
    """
    module = None
    if source.device.type == "cuda" or (source.quantised is not None and source.quantised.has_scales):
        module = module_on_device(source)
    if module is None:
        module = module_of_transformers(source)
    fix_positions_of(source, module)
    return module


def fix_positions_of(source: ModelSource, module: PreTrainedModel) -> None:
    """Fix positions for the longest served sequence. If its length is unknown, the model will be rejected later."""
    if known := source.config.max_model_len or length_limit(module):
        fix_positions(module, known)


def module_on_device(source: ModelSource) -> PreTrainedModel | None:
    """Load the module layer by layer. Returns None if `mapped_model` does not support the model."""
    mapped = mapped_model(source, source.device)
    if mapped is None:
        logger.info("%s: its weights are read into host memory first", source.config.path)
        return None
    mapped.load()
    return mapped.module


def adapt(source: ModelSource, module: PreTrainedModel) -> None:
    """Make a module use states in slots and, on a CPU in one process, store latents in place of keys and values."""
    use_slots(module)
    number_layers(module)
    if source.device.type == "cpu" and source.group is None and not TritonAttention.fits(source.device):
        store_latents(module, ATTENTION_NAME)


def module_of_transformers(source: ModelSource) -> PreTrainedModel:
    """Load a module through transformers, with all weights on the device.

    Raises UnsupportedModel, with the reason, or torch's own error if the device has too little memory.
    """
    path, quantised, found = source.config.path, source.quantised, source.found
    try:
        options = {} if quantised is None else loading_options(quantised, source.device)
        location: str | None = source.location
        if (weights := source.weights_of_gguf()) is not None:
            location, options["state_dict"] = None, weights
        if found is not source.whole:
            options["key_mapping"] = plain_names(source.whole)
        module = _with_our_attention(
            lambda name: pretrained(
                source.model_class, source.config, location, dtype=source.dtype, attention=name, config=found,
                **options,
            )
        )  # fmt: skip
        adapt(source, module)
        if location is None:
            _read_generation_config(source, module)
        return module if "device_map" in options else module.to(source.device)
    except Exception as error:  # each quantisation package raises its own errors
        if is_out_of_memory(error):
            raise
        if quantised is not None:
            raise UnsupportedModel(quantised.why_not(path, first_line(error), source.device)) from error
        if not isinstance(error, OSError | ValueError | RuntimeError):
            raise
        raise UnsupportedModel(f"{path} cannot be loaded: {first_line(error)}") from error


def part_of_rank(source: ModelSource, mapped: MappedModel | None = None) -> tuple[PreTrainedModel, Reference | None]:
    """Return this rank's part of the model and, on rank 0 only, the whole model's reference output.

    mapped: if given, its module is returned without weights, which a decoder reads from it.

    Each rank reads only its own weights. If transformers must read the files, every rank holds the whole model in host
    memory until the model is split.
    """
    group = source.group
    assert group is not None, "a rank belongs to a group"
    whole = _reference_from_files(replace(source, group=None)) if group.rank == 0 else None
    if mapped is not None:
        return mapped.module, whole
    module = module_on_device(source)
    if module is not None:
        fix_positions_of(source, module)
        return module, whole
    module = module_of_transformers(replace(source, device=torch.device("cpu")))
    fix_positions_of(source, module)
    if group.rank == 0:
        whole = Reference.of(source.config.path, module, torch.device("cpu")).to(source.device)
    SplitPlan(module, group, path=source.config.path).split("", module)
    return module.to(source.device), whole


def _reference_from_files(source: ModelSource) -> Reference | None:
    """Compute the reference output layer by layer, reading weights from the files, or return None if unsupported."""
    mapped = mapped_model(source, source.device)
    if mapped is None:
        return None
    if source.device.type == "cpu":
        mapped = MappedModel(mapped.module, mapped.checkpoint)  # each weight is used once, so do not copy it
    mapped.compute_from_files()
    fix_positions_of(source, mapped.module)
    return Reference.of(source.config.path, mapped.module, source.device)


def length_limit(module: PreTrainedModel) -> int | None:
    """Return the model's length limit according to its configuration, or None if it states none."""
    return getattr(module.config.get_text_config(), "max_position_embeddings", None)
