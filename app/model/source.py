"""A model that is to be loaded: its files, and how transformers' code for it is made of them."""

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
from app.model.foreseen import STATES_NOT_COMPUTED
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

if TYPE_CHECKING:  # it takes longer to import than torch, and a model that was verified before needs none of it
    from transformers import PreTrainedConfig, PreTrainedModel

    from app.model.parallel.group import RankGroup

logger = logging.getLogger(__name__)

LAYERS_WITH_STATES = frozenset({"conv", "linear_attention", "mamba", "hybrid"})  # see `recurrent_layers`
_SERVABLE_LAYERS = LAYERS_WITH_STATES | {"full_attention", "sliding_attention", "attention", "mlp", "moe"}

_OTHER_LAYERS = {
    "hybrid_sliding": "attention adds relative positions to its scores, and short convolutions change its inputs",
    "indexed_attention": "an indexer picks the tokens that a token sees",
    "compressed_sparse_attention": "several tokens share one compressed key and value",
    "heavily_compressed_attention": "several tokens share one compressed key and value",
}


def reason_of(error: BaseException) -> str:
    """Why code of transformers or ours cannot compute a model, in one line, with the place in the code."""
    if isinstance(error, UnknownAttention):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__qualname__} at {PurePath(frame.filename).name}:{frame.lineno}: {first_line(error)}"


@contextmanager
def refusing_what_fails(path: str, group: RankGroup | None = None) -> Iterator[None]:
    """Around all that inspects or loads a model: any error of transformers' code or of ours refuses that model.

    path: of the model. group: the ranks that load it together.

    Raises:
        UnsupportedModel: with the reason, for an error that has no words of its own.
    """
    try:
        yield
    except (CarouselError, BackendFailed):
        raise
    except Exception as error:
        if _is_of_machine(error) or (group is not None and isinstance(error, RuntimeError)):
            raise  # the ranks find out which of them has ended first
        raise UnsupportedModel(f"{path} cannot be loaded: {reason_of(error)}") from error


def _is_of_machine(error: Exception) -> bool:
    """Whether a device or its memory has failed, and not the model."""
    return isinstance(error, MemoryError) or is_out_of_memory(error) or "CUDA error" in str(error)


@dataclass(frozen=True, kw_only=True)
class ModelSource:
    """Where a model lies, and what it is to be loaded for."""

    config: ModelConfig
    location: str  # a folder or hub id
    device: torch.device  # meta: sizes alone are wanted
    dtype: torch.dtype
    block_size: int = 16  # of the KV memory; native code supports only some sizes
    cache: Path | None = None  # keeps which models in local folders are verified, and locks of shared weights
    group: RankGroup | None = None  # the ranks that have a part of the model each; all load it

    @cached_property
    def whole(self) -> PreTrainedConfig:
        """transformers' configuration of all that is in the checkpoint. Raises as `config_of_transformers`."""
        return config_of_transformers(self.config, self.location)

    @cached_property
    def found(self) -> PreTrainedConfig:
        """transformers' configuration of the language model. Our attention is known to transformers then.

        Raises:
            InvalidSetup: there is no such model.
            UnsupportedModel: by this alone it cannot be served.
        """
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        path, found = self.config.path, language_config(self.whole)
        name = found.model_type
        try:
            language_class(found)
        except ValueError as error:
            raise UnsupportedModel(f"{path} ({name}) {error}") from error
        if name in STATES_NOT_COMPUTED:
            raise UnsupportedModel(f"{path} ({name}) {not_computed(STATES_NOT_COMPUTED[name])}")
        kinds = [
            f"{kind} ({_OTHER_LAYERS[kind]})" if kind in _OTHER_LAYERS else kind
            for kind in sorted(_layer_types(found) - _SERVABLE_LAYERS)
        ]
        if kinds:
            raise UnsupportedModel(f"{path} ({name}) has layers without paged attention: {', '.join(kinds)}")
        return found

    @property
    def layers_with_states(self) -> frozenset[str]:
        """The types of its layers that keep a state for a whole sequence."""
        return LAYERS_WITH_STATES.intersection(_layer_types(self.found))

    @property
    def model_class(self) -> type[PreTrainedModel]:
        """transformers' class for the language model."""
        return language_class(self.found)

    @cached_property
    def quantised(self) -> Quantised | None:
        """What its config.json says of weights that are quantised in the files."""
        return Quantised.of(read_config(self.config, self.location))

    @cached_property
    def folder(self) -> Path | None:
        """Where its files lie, those of a hub id after they are downloaded. None: transformers will say why."""
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
        """The weights in the files of its folder, or in its GGUF file. Raises OSError if a file cannot be read."""
        if self.gguf is not None:
            return GgufCheckpoint(folder, self.dtype, self.gguf)
        return Checkpoint(folder, self.dtype, self.quantised)

    def weights_of_gguf(self) -> dict[str, torch.Tensor] | None:
        """All weights of a GGUF file, multiplied out. None for another model."""
        if self.gguf is None:
            return None
        self.log_gguf(is_kept=False)
        return GgufCheckpoint(Path(self.location), self.dtype, self.gguf).all()

    @cached_property
    def gguf(self) -> Manifest | None:
        """Where its weights lie in GGUF files; None for another model."""
        return manifest_in(Path(self.location)) if Path(self.location).is_dir() else None

    def log_gguf(self, *, is_kept: bool) -> None:
        """How the weights of a GGUF file are served; of another model nothing.

        is_kept: those that the C++ multiplies as the file has them.
        """
        if (manifest := self.gguf) is None:
            return
        counts = Counter(each.kind for placed in manifest.weights.values() for each in placed)
        kept: list[str] = []
        others: list[str] = []
        for kind, count in counts.most_common():
            (kept if is_kept and can_be_stored(kind) else others).append(f"{count} in {manifest.kinds[str(kind)]}")
        if kept:
            logger.info("%s: its weights stay as the file has them (%s)", self.config.path, ", ".join(kept))
        logger.info("%s: its weights are read as %s (%s)", self.config.path, self.dtype, ", ".join(others) or "none")

    def log_multiplied_out(self) -> None:
        """How its weights are served, if they are quantised in its files. Of a GGUF file, `log_gguf` says so."""
        if self.quantised is None:
            return
        packing, hint = self.quantised.packing, ""
        if packing is not None and self.device.type == "cpu" and self.config.quantization == "none":
            bits = max(packing.bits, 4)
            hint = f", in its memory and time; model.quantization: int{bits} packs them in {bits} bits again"
        name = self.quantised.method if packing is None else packing
        logger.info(
            "%s: its weights, quantised by %s, are multiplied out to %s%s", self.location, name, self.dtype, hint
        )

    def check_ranks(self, size: int) -> None:
        """Raises InvalidSetup, with the numbers, if `size` ranks cannot share it; before any weight is read."""
        if self.quantised is not None:
            raise InvalidSetup(
                f"replicas.tensor_parallel: got {size}; a quantised checkpoint is not divided among ranks. Serve the "
                f"one that is not quantised (on GPUs model.quantization: fp8 may quantise it), or set "
                f"replicas.tensor_parallel to 1"
            )
        if self.layers_with_states:
            raise InvalidSetup(
                f"replicas.tensor_parallel: got {size}; {self.config.path} has recurrent layers "
                f"({', '.join(sorted(self.layers_with_states))}), which are not divided among ranks: set it to 1"
            )
        check_divisible(shared_numbers(self.found), size, of=self.config.path)


def not_computed(recurrence: str) -> str:
    """Why a model is refused that has layers with such a recurrence."""
    return (
        f"has layers with a state that is not computed here: {recurrence}. Short convolutions, the gated delta rule, "
        f"Mamba 1 and Mamba 2 are"
    )


def _layer_types(found: PreTrainedConfig) -> set[str]:
    text = found.get_text_config()
    return {*(getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or ())}


def config_of_transformers(config: ModelConfig, location: str) -> PreTrainedConfig:
    """Raises InvalidSetup if there is no such model, UnsupportedModel if it has an encoder and a decoder."""
    from transformers import AutoConfig

    try:
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            location, revision=config.revision, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise InvalidSetup(
            f"model.path {config.path!r} is neither a folder with a model nor a model that can be loaded "
            f"(looked at {location!r}): {first_line(error)}"
        ) from error
    if getattr(found, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{config.path} is an encoder-decoder model ({found.model_type}); none is served")
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
    """As transformers loads it, by one of its Auto classes, from safetensors alone. No code of a repository runs.

    location: None where `options` have all weights.
    unused: how the names of weights begin that its files may lack.

    Raises ValueError if they lack others, which transformers would leave random, and what transformers raises.
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
    """transformers logs a table of all weights that a model does not have, such as those of towers."""
    log = logging.getLogger("transformers.modeling_utils")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def module_without_weights(source: ModelSource, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' model on the meta device."""
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
    """What `make` gives for our attention. Where the code has a list of its own, which our attention is not in, that
    is a model with its own attention: see `own_attention`.

    make: takes the name of an attention function.
    """
    try:
        return make(ATTENTION_NAME)
    except KeyError as error:
        if error.args != (ATTENTION_NAME,):
            raise
        return make("eager")


def mapped_model(source: ModelSource, device: torch.device | None = None) -> MappedModel | None:
    """A model in a folder, or this rank's part of it, if it is Llama-like by all but its attention, and its files hold
    its weights.

    device: onto which they are given; None: as they are mapped, for what the C++ decoder may compute.

    None where transformers changes weights that it reads, or has to say what is wrong with them.
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
    """transformers' model with its weights on the device, and positions that do not depend on what else is in a step.

    On a GPU straight from the files where those can be read as they are. Of other models all weights pass through the
    host's memory: transformers needs `accelerate` to avoid that.
    """
    module = None
    if source.device.type == "cuda" or (source.quantised is not None and source.quantised.has_scales):
        module = module_on_device(source)
    if module is None:
        module = module_of_transformers(source)
    fix_positions_of(source, module)
    return module


def fix_positions_of(source: ModelSource, module: PreTrainedModel) -> None:
    """For the longest sequence that is served. A model that cannot be served is refused for that reason later."""
    if known := source.config.max_model_len or length_limit(module):
        fix_positions(module, known)


def module_on_device(source: ModelSource) -> PreTrainedModel | None:
    """Read layer by layer; None where the files cannot be read as they are."""
    mapped = mapped_model(source, source.device)
    if mapped is None:
        logger.info("%s: its weights are read into the host's memory first", source.config.path)
        return None
    mapped.load()
    return mapped.module


def adapt(source: ModelSource, module: PreTrainedModel) -> None:
    """Have a model compute with the states and the latents of a step. Latents only on CPUs, in one process."""
    use_slots(module)
    number_layers(module)
    if source.device.type == "cpu" and source.group is None and not TritonAttention.fits(source.device):
        store_latents(module, ATTENTION_NAME)


def module_of_transformers(source: ModelSource) -> PreTrainedModel:
    """As transformers loads it, with all its weights on the device.

    Raises UnsupportedModel with what is wrong, torch's own error where the device's memory is too small.
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
    except Exception as error:  # each package of quantised weights has its own
        if is_out_of_memory(error):
            raise
        if quantised is not None:
            raise UnsupportedModel(quantised.why_not(path, first_line(error), source.device)) from error
        if not isinstance(error, OSError | ValueError | RuntimeError):
            raise
        raise UnsupportedModel(f"{path} cannot be loaded: {first_line(error)}") from error


def part_of_rank(source: ModelSource, mapped: MappedModel | None = None) -> tuple[PreTrainedModel, Reference | None]:
    """This rank's part of a model on the device, and on rank 0 what the whole model gives.

    mapped: has the weights of the part, where the module is not to hold them.

    Each rank reads its own numbers. Of a model whose files transformers has to read, each has the whole in the host's
    memory until it is divided.
    """
    group = source.group
    assert group is not None, "a rank is one of a group"
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
    """What a model gives that is computed from its files, a layer at a time on the device. None: it cannot be."""
    mapped = mapped_model(source, source.device)
    if mapped is None:
        return None
    if source.device.type == "cpu":
        mapped = MappedModel(mapped.module, mapped.checkpoint)  # without copies of what is needed once
    mapped.compute_from_files()
    fix_positions_of(source, mapped.module)
    return Reference.of(source.config.path, mapped.module, source.device)


def length_limit(module: PreTrainedModel) -> int | None:
    """The longest sequence that a model knows."""
    return getattr(module.config.get_text_config(), "max_position_embeddings", None)
