"""A transformers model from a folder or hub id, checked to be one that can be served."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from app.config import ModelConfig
from app.engine.batch import ScheduledSequence, StepBatch
from app.engine.request import ModelInfo, SamplingParams
from app.errors import InvalidSetup, UnsupportedModel, first_line
from app.model.attention import (
    ATTENTION_NAME,
    AttentionRules,
    AttentionStep,
    PagedAttention,
    ProbeStep,
    UnknownAttention,
    paged_attention,
)
from app.model.cpu.checkpoint import Checkpoint, MappedModel, add_positions
from app.model.cpu.decoder import NativeDecoder
from app.model.cpu.kept_check import CheckedModel, KeptCheck, digest_of_files
from app.model.cpu.kv_cache import NativeKVCache
from app.model.cpu.library import ThreadPool, is_fast, library
from app.model.cpu.shared_weights import Sharing, shared_weights
from app.model.cpu.weights import BITS, Allocate, NativeWeights, pack_weights, why_not_native
from app.model.cuda.adapters import AdapterSlots
from app.model.cuda.attention import TritonAttention
from app.model.cuda.decoder import CudaDecoder
from app.model.cuda.fp8 import why_no_fp8, why_not_in_fp8
from app.model.cuda.weights import JoinedWeights, join_weights
from app.model.description import as_token_ids, max_model_len, read_config
from app.model.inputs import ModelInputs, Segments, build_inputs
from app.model.kv_cache import LayerShape
from app.model.llama import (
    ARCHITECTURES,
    DecoderSettings,
    by_expert,
    settings_of,
    why_attention_is_not_llama_like,
    why_not_llama_like,
)
from app.model.memory import is_out_of_memory
from app.model.packed_linear import pack_linear_layers
from app.model.parallel.group import RankGroup
from app.model.parallel.split_plan import Exchange, SizesOfRank, SplitPlan, check_divisible
from app.model.positions import fix_positions
from app.model.quantised_checkpoint import Quantised, loading_options

if TYPE_CHECKING:  # it takes longer to import than torch, and a model with a kept check needs none of it
    from transformers import PreTrainedConfig, PreTrainedModel

logger = logging.getLogger(__name__)

_SERVABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "attention"})
_FILES = ["*.json", "model*.safetensors"]  # of a model on a hub
_PROBE_TOKENS = 24
_NOT_AMONG_RANKS = "quantised weights are not divided among ranks; set replicas.tensor_parallel to 1"
_GREEDY = SamplingParams(max_tokens=1, temperature=0.0)
# Of the first layer's output and of the whole model's, relative to their size, by number type or quantised weights.
# Measured at most in tests/tiny_models.py, which has wide weights: 0.04 and 0.08 in 8 bits, 0.43 and 0.63 in 4.
# In SmolLM2-135M 0.008 and 0.021 in 8 bits, 0.009 and 0.025 in 4. Unrelated outputs of a size differ by 1.4.
_MAX_DIFFERENCES = {
    torch.float32: (1e-4, 1e-3),
    torch.bfloat16: (0.03, 0.5),
    "int8": (0.1, 0.25),
    "int4": (0.7, 1.0),
    "fp8": (0.3, 0.6),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model that can be served, and its measured facts."""

    module: PreTrainedModel | None  # None where the weights are in `native` or `joined`
    native: NativeWeights | None
    joined: JoinedWeights | None = None  # of the decoder for CUDA
    adapters: AdapterSlots | None = None  # beside `joined`, where adapters may be loaded
    facts: ModelInfo
    layers: dict[int, LayerShape]  # by layer index
    dtype: torch.dtype
    device: torch.device
    probe: Probe | None = None  # where Triton's kernels are compared with it: they need the whole KV memory
    group: Exchange | None = None  # where `module` or `joined` is a rank's part

    def tensors(self) -> Iterator[torch.Tensor]:
        """All weights, and what else is kept beside them; those that are tied more than once."""
        if self.native is not None:
            yield from self.native.tensors()
        if self.joined is not None:
            yield from self.joined.tensors()
        if self.adapters is not None:
            yield from self.adapters.tensors()
        if self.module is not None:
            yield from (*self.module.parameters(), *self.module.buffers())


@torch.inference_mode()
def load_model(
    config: ModelConfig,
    location: str,
    *,
    block_size: int = 16,
    checks: Path | None = None,
    group: RankGroup | None = None,
) -> LoadedModel:
    """Load weights from safetensors and try one short forward pass. Code from a model repository never runs.

    block_size: of the KV memory; native code supports only some sizes.
    checks: a folder that keeps which models in local folders have passed; they are not tried again. It also has the
        locks of weights that are shared with other processes.
    group: the ranks that have a part of the model each; all call this function.

    Raises:
        InvalidSetup: there is no such model, or no such device, or the model cannot be quantised as asked.
        UnsupportedModel: it is not a decoder-only model with an attention that can be paged; the message says why.
    """
    device = device_of(config)
    _check_quantization(config, device, num_ranks=1 if group is None else group.size)
    uses_triton = TritonAttention.fits(device)
    chosen = dtype_of(config, location)
    dtype = chosen.dtype
    logger.info("%s: the type is %s: %s", config.path, chosen.name, chosen.reason)
    may_be_native = device.type == "cpu" and config.backend == "auto" and not uses_triton and group is None
    check = _kept_check(config, checks, Path(location), dtype, block_size) if may_be_native else None
    checked = None if check is None else check.read()
    if checked is not None:
        return _load_checked(config, location, checked, dtype, checks)
    found = _check_architecture(config, location)
    quantised = Quantised.of(read_config(config, location))
    is_packed = may_be_native and library() is not None
    read = _read(device, config, found, location, dtype, quantised, group, is_packed=is_packed)
    module, mapped = read.module, read.mapped
    probe = _probe(config, module, device)
    if read.whole is not None:
        _compare(config, "divided among ranks", probe.own, read.whole)
    facts, limit = _facts_of(config, module, probe), _limit_of(module)
    if mapped is None:
        _check_positions(config, module, probe, facts.max_model_len)
    native = _native_weights(config, location, module, mapped, probe, block_size, checks) if may_be_native else None
    if native is None and mapped is not None and may_be_native:
        module = _with_weights(device, config, found, location, dtype, quantised)
    may_join = device.type == "cpu" and config.backend != "torch" and not uses_triton
    if native is None and may_join and pack_linear_layers(module):
        _compare(config, "with packed weights", probe.run(module, ProbeStep()), probe.own)
    if native is not None and limit is not None and check is not None and mapped is not None:
        check.write(CheckedModel(settings=native.settings, facts=replace(facts, max_model_len=limit)))
    loaded = LoadedModel(
        module=module if native is None else None,
        native=native,
        facts=facts,
        layers=probe.layers,
        dtype=dtype,
        device=device,
        probe=probe if uses_triton else None,
        group=group,
    )
    if not uses_triton or config.backend == "torch":
        return loaded
    del module, probe, read  # their memory is needed

    def read_again() -> PreTrainedModel:
        if group is not None:
            return _part_of_rank(device, config, found, location, dtype, group)[0]
        return _with_weights(device, config, found, location, dtype, quantised)

    return _with_joined_weights(config, loaded, read_again, block_size=block_size, mapped=mapped, ranks=group)


@dataclass(frozen=True, slots=True)
class _ReadModel:
    """A model, or one rank's part, as transformers' code computes it."""

    module: PreTrainedModel
    whole: _Output | None = None  # where the module is a part: what the whole model gives on the tokens of `_probe`
    mapped: MappedModel | None = None  # has the weights, where the module does not hold them


def _read(
    device: torch.device,
    config: ModelConfig,
    found: PreTrainedConfig,
    location: str,
    dtype: torch.dtype,
    quantised: Quantised | None,
    group: RankGroup | None,
    *,
    is_packed: bool,
) -> _ReadModel:
    """is_packed: its weights are to be packed for the C++ decoder."""
    if group is not None:
        _check_ranks(config, found, quantised, group.size)
        return _ReadModel(*_part_of_rank(device, config, found, location, dtype, group))
    mapped = None
    if config.quantization == "fp8":  # the device need not hold the weights before they are in FP8
        mapped = _mapped(found, _folder_of(config, location), dtype, quantised, device)
    elif is_packed:
        mapped = _mapped(found, Path(location), dtype, quantised)
    if mapped is None:
        return _ReadModel(_with_weights(device, config, found, location, dtype, quantised))
    mapped.compute_from_files()
    if known := config.max_model_len or _limit_of(mapped.module):
        fix_positions(mapped.module, known)
    return _ReadModel(mapped.module, mapped=mapped)


def _facts_of(config: ModelConfig, module: PreTrainedModel, probe: Probe) -> ModelInfo:
    return ModelInfo(
        max_model_len=max_model_len(config, _limit_of(module)),
        vocab_size=probe.vocab_size,
        eos_token_ids=eos_token_ids(module),
        embedding_size=None if module.base_model is module else probe.own.first_layer.shape[-1],
    )


def _limit_of(module: PreTrainedModel) -> int | None:
    """The longest sequence that a model knows."""
    return getattr(module.config.get_text_config(), "max_position_embeddings", None)


def _mapped(
    found: PreTrainedConfig,
    location: Path | None,
    dtype: torch.dtype,
    quantised: Quantised | None,
    device: torch.device | None = None,
) -> MappedModel | None:
    """A model in a local folder, if it is Llama-like by all but its attention, and its files hold its weights.

    device: onto which they are given; None: as they are mapped, for what the C++ decoder may compute.

    None where transformers changes weights that it reads, or has to say what is wrong with them.
    """
    if location is None or not location.is_dir() or (quantised is not None and not quantised.has_scales):
        return None
    module = _without_weights(found, str(location), dtype)
    if (why_not_native(module) if device is None else why_not_llama_like(module)) is not None:
        return None
    try:
        checkpoint = Checkpoint(location, dtype, quantised)
    except OSError:
        return None
    if not checkpoint.has_weights_of(module):
        return None
    if quantised is not None:
        logger.info("%s: its weights, quantised by %s, are multiplied out to %s", location, quantised.method, dtype)
    return MappedModel(module, checkpoint, device)


def _with_weights(
    device: torch.device,
    config: ModelConfig,
    found: PreTrainedConfig,
    location: str,
    dtype: torch.dtype,
    quantised: Quantised | None,
) -> PreTrainedModel:
    """The model as transformers' code computes it, with positions that do not depend on what else is in a step."""
    if device.type == "cuda" or (quantised is not None and quantised.has_scales):
        module = _loaded_onto(device, config, found, location, dtype, quantised)
    else:
        module = _from_pretrained(device, config, location, dtype, quantised)
    # A model that cannot be served at all is refused for that reason later.
    if known := config.max_model_len or _limit_of(module):
        fix_positions(module, known)
    return module


def _loaded_onto(
    device: torch.device,
    config: ModelConfig,
    found: PreTrainedConfig,
    location: str,
    dtype: torch.dtype,
    quantised: Quantised | None = None,
) -> PreTrainedModel:
    """The model with its weights on a device; straight from their files where those can be read as they are.

    Of other models all weights pass through the host's memory: transformers needs `accelerate` to avoid that.
    """
    mapped = _mapped(found, _folder_of(config, location), dtype, quantised, device)
    if mapped is None:
        logger.info("%s: its weights are read into the host's memory first", config.path)
        return _from_pretrained(device, config, location, dtype, quantised)
    mapped.load()
    return mapped.module


def _folder_of(config: ModelConfig, location: str) -> Path | None:
    """Where a model's files lie, those of a hub id after they are downloaded. None: transformers will say why."""
    if Path(location).is_dir():
        return Path(location)
    from transformers.utils.hub import snapshot_download

    try:
        return Path(snapshot_download(location, revision=config.revision, allow_patterns=_FILES))
    except (OSError, ValueError) as error:
        logger.info("%s cannot be downloaded as a whole: %s", config.path, first_line(error))
        return None


def _without_weights(found: PreTrainedConfig, location: str, dtype: torch.dtype) -> PreTrainedModel:
    """transformers' model on the meta device."""
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.device("meta"):
        module: PreTrainedModel = AutoModelForCausalLM.from_config(
            found, dtype=dtype, attn_implementation=ATTENTION_NAME
        )
    if (Path(location) / "generation_config.json").is_file():
        module.generation_config = GenerationConfig.from_pretrained(location)
    return module.eval()


def _kept_check(
    config: ModelConfig, checks: Path | None, location: Path, dtype: torch.dtype, block_size: int
) -> KeptCheck | None:
    """None where checks are not kept: of models on a hub, or without native code."""
    if checks is None or not location.is_dir() or not (config.quantization != "none" or is_fast(dtype)):
        return None
    return KeptCheck(
        checks,
        location,
        dtype=dtype,
        quantization=config.quantization,
        block_size=block_size,
    )


def _load_checked(
    config: ModelConfig, location: str, checked: CheckedModel, dtype: torch.dtype, checks: Path | None
) -> LoadedModel:
    settings = checked.settings

    def pack(allocate: Allocate) -> NativeWeights:
        weights = Checkpoint(Path(location), dtype, Quantised.of(read_config(config, location)))
        bits = BITS[config.quantization]
        return pack_weights(weights, settings, bits=bits, release=weights.release, allocate=allocate)

    native = shared_weights(pack, _sharing(config, Path(location), settings, dtype, checks))
    return _of_check(config, checked, native, dtype)


def _sharing(
    config: ModelConfig, folder: Path | None, settings: DecoderSettings, dtype: torch.dtype, checks: Path | None
) -> Sharing | None:
    """folder: of the model's files."""
    if checks is None or folder is None:
        return None
    return Sharing(digest_of_files(folder, dtype, config.quantization, settings), checks)


def _of_check(config: ModelConfig, checked: CheckedModel, native: NativeWeights, dtype: torch.dtype) -> LoadedModel:
    settings = checked.settings
    shape = LayerShape(num_kv_heads=settings.num_kv_heads, key_dim=settings.head_dim, value_dim=settings.head_dim)
    return LoadedModel(
        module=None,
        native=native,
        facts=replace(checked.facts, max_model_len=max_model_len(config, checked.facts.max_model_len)),
        layers=dict.fromkeys(range(len(settings.sliding_windows)), shape),
        dtype=dtype,
        device=torch.device("cpu"),
    )


@torch.inference_mode()
def model_of_check(config: ModelConfig, location: str, *, block_size: int, checks: Path) -> LoadedModel | None:
    """As `model_of_config` for the C++ decoder, without transformers; None where no check of the model is kept."""
    dtype = dtype_of(config, location).dtype
    check = _kept_check(config, checks, Path(location), dtype, block_size)
    checked = None if check is None else check.read()
    if checked is None:
        return None
    found = Checkpoint(Path(location), dtype, Quantised.of(read_config(config, location)))

    def without_numbers(name: str) -> torch.Tensor | None:
        weight = found(name)
        return None if weight is None else weight.to("meta")

    native = pack_weights(without_numbers, checked.settings, bits=BITS[config.quantization])
    return _of_check(config, checked, native, dtype)


@torch.inference_mode()
def model_of_config(
    config: ModelConfig,
    location: str,
    *,
    dtype: torch.dtype,
    num_ranks: int = 1,
    native_block_size: int | None = None,
) -> LoadedModel:
    """A model, or the part that each of several ranks has, on the meta device, from its config.json alone: it has sizes
    and no weights.

    native_block_size: of the KV memory of the C++ decoder, where that is to compute it; None: as on a GPU.

    Raises:
        InvalidSetup: there is no such model, nothing says how long its context is, or the ranks cannot share it.
        UnsupportedModel: it cannot be served, or its steps cannot be known without weights; the message says why.
    """
    found = _check_architecture(config, location)
    quantised = Quantised.of(read_config(config, location))
    _check_sizes_are_known(config, found, quantised)
    limit = getattr(found.get_text_config(), "max_position_embeddings", None)
    longest = max_model_len(config, limit)
    module = _without_weights(found, location, dtype)
    # Shapes do not depend on the type, but the meta device has products of experts only in bfloat16.
    tried = module if dtype is torch.bfloat16 else _without_weights(found, location, torch.bfloat16)
    if num_ranks > 1:
        _check_ranks(config, found, quantised, num_ranks)
    for each in (module,) if tried is module else (module, tried):
        fix_positions(each, longest)
        if num_ranks > 1:
            SplitPlan(each, SizesOfRank(num_ranks), path=config.path).split("", each)
    step = ProbeStep()
    output = _run_without_numbers(config, tried, step)
    num_embeddings = module.get_input_embeddings().weight.shape[0]
    loaded = LoadedModel(
        module=module,
        native=None,
        facts=ModelInfo(
            max_model_len=longest,
            vocab_size=min(output.logits.shape[-1], num_embeddings),
            eos_token_ids=eos_token_ids(module),
            embedding_size=None if module.base_model is module else output.first_layer.shape[-1],
        ),
        layers=step.layers,
        dtype=dtype,
        device=torch.device("meta"),
        group=SizesOfRank(num_ranks) if num_ranks > 1 else None,
    )
    if native_block_size is not None:
        return _packed_without_numbers(config, loaded, module, step.rules, native_block_size)
    return _joined_without_numbers(config, loaded, module, step.rules, output)


def _check_sizes_are_known(config: ModelConfig, found: PreTrainedConfig, quantised: Quantised | None) -> None:
    # The weights that are multiplied out take as much as those of any other checkpoint.
    if quantised is not None and not (
        quantised.has_scales and ARCHITECTURES.issuperset(found.architectures or ["none"])
    ):
        raise UnsupportedModel(
            f"{config.path} is a quantised checkpoint: its size does not follow from its config.json"
        )


def _run_without_numbers(config: ModelConfig, module: PreTrainedModel, step: ProbeStep) -> _Output:
    """A few tokens on the meta device. Raises UnsupportedModel where sizes follow from numbers, or nothing is paged."""
    token_ids = torch.zeros(1, _PROBE_TOKENS, dtype=torch.long, device="meta")
    try:
        return _run(module, token_ids, token_ids, step)
    except (UnknownAttention, TypeError) as error:
        raise UnsupportedModel(f"{config.path} cannot run on paged attention: {first_line(error)}") from error
    except RuntimeError as error:  # an operator with a result of a size that follows from numbers
        raise UnsupportedModel(f"{config.path} cannot be planned without its weights: {first_line(error)}") from error


def _joined_without_numbers(
    config: ModelConfig,
    model: LoadedModel,
    module: PreTrainedModel,
    rules: dict[int, AttentionRules],
    own: _Output,
) -> LoadedModel:
    """The model for the decoder for CUDA, if that computes it; else as it is. own: what the module gives."""
    reason = _why_not_joined(config, module, rules)
    if config.quantization == "fp8" and (model.group is not None or reason is not None):
        raise _not_quantised(config, reason or _NOT_AMONG_RANKS)
    if config.backend == "torch" or reason is not None:
        return model
    add_positions(module)
    settings, num_positions = _joined_settings(module, rules, own, model.group), model.facts.max_model_len
    joined = join_weights(module, settings, num_positions=num_positions, quantised=config.quantization == "fp8")
    return replace(model, module=None, joined=joined, adapters=_slots_for_adapters(config, joined, model.group))


def _packed_without_numbers(
    config: ModelConfig,
    model: LoadedModel,
    module: PreTrainedModel,
    rules: dict[int, AttentionRules],
    block_size: int,
) -> LoadedModel:
    """The model for the C++ decoder. Raises UnsupportedModel where that does not compute it on this machine."""
    reason = _why_not_packed(module, rules, model.layers, block_size)
    if reason is not None:
        raise UnsupportedModel(
            f"the memory of {config.path} on a CPU is planned only where the native decoder computes it, and here it "
            f"does not: {reason}"
        )
    add_positions(module)
    weights = by_expert(module.state_dict()).get
    native = pack_weights(weights, settings_of(module, rules), bits=BITS[config.quantization])
    return replace(model, module=None, native=native)


def device_of(config: ModelConfig) -> torch.device:
    has_cuda = torch.cuda.is_available()
    if config.device == "cuda" and not has_cuda:
        raise InvalidSetup("model.device is cuda, but torch sees no CUDA device; use cpu, or install a CUDA torch")
    device = torch.device("cuda" if has_cuda and config.device != "cpu" else "cpu")
    if device.type == "cuda" and not TritonAttention.fits(device):
        raise InvalidSetup(
            f"model.device is {config.device} and torch sees a CUDA device, but Triton, in which attention is written, "
            f"is not installed: pip install triton (torch for CUDA brings it on Linux), or set model.device: cpu"
        )
    return device


def _check_quantization(config: ModelConfig, device: torch.device, *, num_ranks: int) -> None:
    """Refuse what this machine cannot do, before any weight is read."""
    if config.quantization == "none":
        return
    if config.quantization == "fp8":
        reason = why_no_fp8(device, on_a_cpu="model.quantization: int8 and int4")
        reason = reason or (_NOT_AMONG_RANKS if num_ranks > 1 else None)
        if reason is not None:
            raise _not_quantised(config, reason)
        return
    if num_ranks > 1:
        raise _not_quantised(config, _NOT_AMONG_RANKS)
    if device.type != "cpu":
        raise _not_quantised(config, f"it runs on {device.type}; set model.device to cpu")
    if library() is None:
        raise _not_quantised(config, "the native code could not be built; install a C++ compiler (the log says more)")


def _not_quantised(config: ModelConfig, reason: str) -> InvalidSetup:
    return InvalidSetup(
        f"model.quantization is {config.quantization}, which only {config.quantised_by} computes; "
        f"{config.path} cannot run there: {reason}. Set model.quantization to none"
    )


class ChosenDtype(NamedTuple):
    """A type of weights and KV memory, and why it is that."""

    dtype: torch.dtype
    reason: str

    @property
    def name(self) -> str:
        return str(self.dtype).removeprefix("torch.")


def dtype_of(config: ModelConfig, location: str) -> ChosenDtype:
    """As configured; else bfloat16 on CUDA, and on a CPU the checkpoint's own where the native code is fast in it.

    Raises:
        InvalidSetup: there is no such device, or it has no Triton.
    """
    if config.dtype != "auto":
        return ChosenDtype(torch.float32 if config.dtype == "float32" else torch.bfloat16, "model.dtype says so")
    if device_of(config).type == "cuda":
        return ChosenDtype(torch.bfloat16, "it runs on CUDA")
    try:
        described = read_config(config, location)
    except InvalidSetup:  # said when the model is loaded, with more
        described = {}
    text = described.get("text_config") or described
    own = next((each[key] for each in (described, text) for key in ("dtype", "torch_dtype") if each.get(key)), None)
    if own == "bfloat16":
        reason = _why_not_bfloat16(config, described)
        if reason is None:
            return ChosenDtype(torch.bfloat16, "the checkpoint's own, in which the native code is fast on this CPU")
        return ChosenDtype(torch.float32, f"the checkpoint is in bfloat16, but {reason}")
    if own == "float16":  # bfloat16 has 8 bits of its 11
        return ChosenDtype(torch.float32, "the checkpoint is in float16, which bfloat16 would round")
    return ChosenDtype(torch.float32, "the checkpoint's own" if own == "float32" else "the checkpoint names no other")


def _why_not_bfloat16(config: ModelConfig, described: dict[str, Any]) -> str | None:
    if config.backend != "auto":
        return "transformers' code computes it (model.backend is torch)"
    architectures = described.get("architectures") or ["a model without a name"]
    if not ARCHITECTURES.issuperset(architectures):
        return f"transformers' code computes {', '.join(architectures)}"
    return None if is_fast(torch.bfloat16) else "the native code is not fast in it on this CPU"


def _check_architecture(config: ModelConfig, location: str) -> PreTrainedConfig:
    """Its configuration. Refuse by it, before any weight is read. Our attention is known to transformers then."""
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM

    AttentionInterface.register(ATTENTION_NAME, paged_attention)
    try:
        found = AutoConfig.from_pretrained(location, revision=config.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise InvalidSetup(
            f"model.path {config.path!r} is neither a folder with a model nor a model that can be loaded "
            f"(looked at {location!r}): {first_line(error)}"
        ) from error
    name = found.model_type
    if getattr(found, "is_encoder_decoder", False):
        raise UnsupportedModel(
            f"{config.path} is an encoder-decoder model ({name}); only decoder-only models are served"
        )
    if type(found) not in AutoModelForCausalLM._model_mapping:
        raise UnsupportedModel(f"{config.path} ({name}) is not a model that generates text")
    kinds = set(getattr(found.get_text_config(), "layer_types", None) or ()) - _SERVABLE_LAYERS
    if kinds:
        raise UnsupportedModel(f"{config.path} ({name}) has layers without paged attention: {', '.join(sorted(kinds))}")
    return found


def _from_pretrained(
    device: torch.device,
    config: ModelConfig,
    location: str,
    dtype: torch.dtype,
    quantised: Quantised | None = None,
) -> PreTrainedModel:
    """As transformers loads it, with all its weights on a device.

    Raises UnsupportedModel with what is wrong, torch's own error where the device's memory is too small.
    """
    from transformers import AutoModelForCausalLM

    try:
        options = {} if quantised is None else loading_options(quantised, device)
        module: PreTrainedModel
        module, report = AutoModelForCausalLM.from_pretrained(
            location,
            revision=config.revision,
            dtype=dtype,
            attn_implementation=ATTENTION_NAME,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            **options,
        )
        if missing := sorted(report["missing_keys"]):  # transformers would leave them random
            raise ValueError(f"its files lack {len(missing)} weights, such as {missing[0]}")
        return module.eval() if "device_map" in options else module.eval().to(device)
    except Exception as error:  # each package of quantised weights has its own
        if is_out_of_memory(error):
            raise
        if quantised is not None:
            raise UnsupportedModel(quantised.why_not(config.path, first_line(error), device)) from error
        if not isinstance(error, OSError | ValueError | RuntimeError):
            raise
        raise UnsupportedModel(f"{config.path} cannot be loaded: {first_line(error)}") from error


@dataclass(frozen=True, slots=True)
class _Output:
    """The outputs for the first few tokens of a sequence."""

    first_layer: torch.Tensor  # [1, num_tokens, hidden_size]
    logits: torch.Tensor  # [1, num_tokens, vocab_size]
    is_mixture: bool = False  # of experts

    def part(self, first: int, end: int) -> _Output:
        """The outputs for some of the tokens."""
        return _Output(self.first_layer[:, first:end], self.logits[:, first:end], self.is_mixture)

    def to(self, device: torch.device) -> _Output:
        return replace(self, first_layer=self.first_layer.to(device), logits=self.logits.to(device))


@dataclass(frozen=True, slots=True)
class Probe:
    """The results of a model on a few tokens, with its own attention and with ours."""

    token_ids: torch.Tensor  # [1, num_tokens]
    positions: torch.Tensor  # [1, num_tokens]
    own: _Output
    layers: dict[int, LayerShape]
    rules: dict[int, AttentionRules]
    vocab_size: int

    def run(self, module: PreTrainedModel, step: ProbeStep | None) -> _Output:
        return _run(module, self.token_ids, self.positions, step)


def _run(
    module: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor, step: AttentionStep | None
) -> _Output:
    output = module(
        input_ids=token_ids, position_ids=positions, use_cache=False, output_hidden_states=True, paged=step
    )  # fmt: skip
    is_mixture = any(name.endswith(".experts") for name, _ in module.named_modules())
    return _Output(output.hidden_states[1], output.logits, is_mixture)


def _check_ranks(config: ModelConfig, found: PreTrainedConfig, quantised: Quantised | None, size: int) -> None:
    """Raises InvalidSetup, with the numbers, if `size` ranks cannot share a model; before any weight is read."""
    if quantised is not None or config.quantization != "none":
        raise InvalidSetup(
            f"replicas.tensor_parallel: got {size}; quantised weights are not divided among ranks. Serve weights that "
            f"are not quantised, or set replicas.tensor_parallel to 1"
        )
    check_divisible(found, size, path=config.path)


def _part_of_rank(
    device: torch.device,
    config: ModelConfig,
    found: PreTrainedConfig,
    location: str,
    dtype: torch.dtype,
    group: RankGroup,
) -> tuple[PreTrainedModel, _Output]:
    """This rank's part of a model, and the outputs of the whole one on the tokens of `_probe`, both on the device.

    The host reads and divides it: a device may not hold the whole.
    """
    host = torch.device("cpu")
    module = _with_weights(host, config, found, location, dtype, None)
    plan = SplitPlan(module, group, path=config.path)
    whole = _own_output(module, *_tokens_to_try(module, host))
    plan.split("", module)
    module.to(device)
    return module, whole.to(device)


def _own_output(module: PreTrainedModel, token_ids: torch.Tensor, positions: torch.Tensor) -> _Output:
    """With the model's own attention."""
    module.set_attn_implementation("eager")
    own = _run(module, token_ids, positions, None)
    module.set_attn_implementation(ATTENTION_NAME)
    return own


def _tokens_to_try(module: PreTrainedModel, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """A few tokens and their positions, [1, num_tokens] each."""
    positions = torch.arange(_PROBE_TOKENS, device=device)[None]
    num_embeddings = module.get_input_embeddings().weight.shape[0]
    return _spread_tokens(num_embeddings, positions), positions


def _probe(config: ModelConfig, module: PreTrainedModel, device: torch.device) -> Probe:
    """Run our attention and the model's own on the same few tokens: refuse a model on which they differ."""
    name = module.config.model_type
    token_ids, positions = _tokens_to_try(module, device)
    num_embeddings = module.get_input_embeddings().weight.shape[0]
    step = ProbeStep()
    try:
        ours = _run(module, token_ids, positions, step)
    except (UnknownAttention, TypeError) as error:
        raise UnsupportedModel(f"{config.path} ({name}) cannot run on paged attention: {first_line(error)}") from error
    except (RuntimeError, ImportError) as error:
        if not getattr(module, "is_quantized", False) or is_out_of_memory(error):
            raise
        raise UnsupportedModel(
            f"the quantised layers of {config.path} cannot be computed on {device.type}: {first_line(error)}. Serve "
            f"the checkpoint that is not quantised"
        ) from error
    if not step.layers:
        raise UnsupportedModel(f"{config.path} ({name}) ignores the attention it is given, so its KV cannot be paged")
    own = _own_output(module, token_ids, positions)
    _compare(config, "with paged attention", ours, own)
    return Probe(
        token_ids, positions, own, step.layers, step.rules, vocab_size=min(own.logits.shape[-1], num_embeddings)
    )


def _spread_tokens(num_embeddings: int, positions: torch.Tensor) -> torch.Tensor:
    """Ordinary ones: special tokens, which often are the first, bring out numbers that no text does."""
    return (positions + 1) * max(1, num_embeddings // (_PROBE_TOKENS + 1)) % num_embeddings


def _check_positions(config: ModelConfig, module: PreTrainedModel, probe: Probe, max_model_len: int) -> None:
    """Refuse a model with positions that depend on what else is in a step: here the last token of a long sequence."""
    beside = torch.full_like(probe.positions[:, :1], max_model_len - 1)
    token_ids, positions = (torch.cat(both, dim=1) for both in (
        (probe.token_ids, probe.token_ids[:, :1]), (probe.positions, beside)
    ))  # fmt: skip
    found = _run(module, token_ids, positions, ProbeStep())
    _compare(config, "beside a long sequence", found.part(0, _PROBE_TOKENS), probe.own)


@torch.inference_mode()
def check_attention(config: ModelConfig, model: LoadedModel, attention: PagedAttention, *, max_blocks: int) -> None:
    """Compare a backend's attention with the model's own, in all the forms that steps have: the first and later pieces
    of a prompt, single tokens. It is as a first request would be: kernels are compiled for the sizes that are served.

    max_blocks: of one sequence. Blocks 0, 1, … are overwritten.

    Raises:
        UnsupportedModel: the results differ by more than rounding.
    """
    assert model.probe is not None, "attention that is not Triton's is compared when the model is loaded"
    token_ids = model.probe.token_ids[0, : max_blocks * attention.block_size].tolist()
    third = max(1, len(token_ids) // 3)
    block_ids = list(range(-(-len(token_ids) // attention.block_size)))
    kv_in_fp8 = isinstance(attention, TritonAttention) and attention.cache.in_fp8
    quantization = "fp8" if kv_in_fp8 else config.quantization

    def computed(start: int, end: int) -> _Output:
        piece = ScheduledSequence("check", tuple(token_ids[start:end]), start, block_ids, True, _GREEDY)
        return _computed(model, attention, piece)

    for what, first, end, size in (  # of a context of one or two tokens there is no more than the first
        ("the beginning of a prompt", 0, third, third),
        ("a later piece of a prompt", third, 2 * third, third),
        ("single tokens", 2 * third, len(token_ids), 1),
    ):
        if first >= len(token_ids):
            continue
        ours = _joined([computed(start, start + size) for start in range(first, end, size)])
        own = model.probe.own.part(first, end)
        _compare(config, f"with {type(attention).__name__}, of {what},", ours, own, quantization)


def _computed(model: LoadedModel, attention: PagedAttention, piece: ScheduledSequence) -> _Output:
    """One piece of a sequence; of a decoder of ours with logits for the first layer's output."""
    batch = StepBatch((piece,), ())
    inputs = build_inputs(batch, block_size=attention.block_size, device=model.device)
    if model.joined is None:
        assert model.module is not None, "native code is for CPUs"
        return _run(model.module, inputs.token_ids, inputs.positions, attention.begin_step(batch, inputs))
    assert isinstance(attention, TritonAttention), "the decoder for CUDA has no other"
    step = attention.begin_step(batch, inputs)
    first, whole = (
        CudaDecoder(model.joined, attention, num_layers=num_layers, group=model.group).compute(
            inputs.token_ids, inputs.positions, step
        )
        for num_layers in (1, 0)
    )
    return _Output(first.logits[None], whole.logits[None])


def _joined(outputs: Sequence[_Output]) -> _Output:
    """One after the other."""
    return _Output(
        torch.cat([each.first_layer for each in outputs], dim=1),
        torch.cat([each.logits for each in outputs], dim=1),
        outputs[0].is_mixture,
    )


def _compare(config: ModelConfig, how: str, ours: _Output, own: _Output, quantization: str = "none") -> None:
    difference = _difference(ours, own, quantization)
    if difference is not None:
        raise UnsupportedModel(f"{config.path} computes other results {how} than with its own code: {difference}")


def _difference(ours: _Output, own: _Output, quantization: str = "none") -> str | None:
    """The difference in words, if it is more than rounding. quantization: of the weights of `ours`, or of its KV."""
    # Rounding errors grow from layer to layer, a wrong attention shows in the first: hence a tight and a wide limit.
    kind = own.logits.dtype if quantization == "none" else quantization
    for what, mine, theirs, limit in zip(
        ("the first layer's output", "the output"),
        (ours.first_layer, ours.logits),
        (own.first_layer, own.logits),
        _MAX_DIFFERENCES.get(kind, _MAX_DIFFERENCES[torch.bfloat16]),
        strict=True,
    ):
        difference = _relative_difference(mine, theirs, by_token=own.is_mixture)
        if not difference <= limit:
            return f"{what} differs by {difference:.2%}, {limit:.2%} is allowed"
    return None


def _native_weights(
    config: ModelConfig,
    location: str,
    module: PreTrainedModel,
    mapped: MappedModel | None,
    probe: Probe,
    block_size: int,
    checks: Path | None,
) -> NativeWeights | None:
    """The weights for the C++ decoder, if it is fast on this machine and computes what the model computes.

    mapped: has the module's weights, where the module itself does not hold them.

    Raises InvalidSetup if not, and the weights were to be quantised.
    """
    reason = _why_not_packed(module, probe.rules, probe.layers, block_size)
    if reason is not None:
        if config.quantization != "none":
            raise _not_quantised(config, reason)
        logger.info("%s runs on transformers' code: %s", config.path, reason)
        return None
    own = _with_first_logits(module, probe)
    settings, bits = settings_of(module, probe.rules), BITS[config.quantization]

    def pack(allocate: Allocate) -> NativeWeights:
        if mapped is None:
            return pack_weights(by_expert(module.state_dict()).get, settings, bits=bits, allocate=allocate)
        release = mapped.checkpoint.release
        return pack_weights(mapped.checkpoint, settings, bits=bits, release=release, allocate=allocate)

    folder = None if checks is None else _folder_of(config, location)
    weights = shared_weights(pack, _sharing(config, folder, settings, module.dtype, checks))
    ours = _native_output(weights, probe.layers, probe.token_ids, block_size)
    difference = _difference(ours, own, config.quantization)
    if difference is not None and bits:
        raise _not_quantised(config, difference)
    if difference is not None:
        logger.warning("%s runs on transformers' code, slower: in C++ %s", config.path, difference)
        return None
    return weights


def _why_not_packed(
    module: PreTrainedModel, rules: dict[int, AttentionRules], layers: dict[int, LayerShape], block_size: int
) -> str | None:
    """Why the C++ decoder does not compute a model on this machine; None where no reason is known."""
    return (
        why_not_native(module)
        or why_attention_is_not_llama_like(module, rules)
        or NativeKVCache.why_not(layers, block_size=block_size, dtype=module.dtype, device=torch.device("cpu"))
    )


def _native_output(
    weights: NativeWeights, layers: dict[int, LayerShape], token_ids: torch.Tensor, block_size: int
) -> _Output:
    """As `_with_first_logits` has it. token_ids: [1, num_tokens]."""
    num_tokens = token_ids.shape[1]
    num_blocks = -(-num_tokens // block_size)
    pages = NativeKVCache(layers, num_blocks=num_blocks, block_size=block_size, dtype=weights.dtype)
    places = torch.arange(num_tokens)
    inputs = ModelInputs(token_ids=token_ids, positions=places[None], slots=places, logits_indices=places)
    segments = Segments(
        torch.tensor([[0, num_tokens, 0, 0]], dtype=torch.int32),
        torch.arange(num_blocks, dtype=torch.int32),
        num_tokens,
    )

    def logits(num_layers: int) -> torch.Tensor:
        decoder = NativeDecoder(weights, pages, ThreadPool(1), num_layers=num_layers)
        return decoder.compute(inputs, segments).logits[None]

    return _Output(logits(1), logits(len(weights.layers)))


def _with_first_logits(module: PreTrainedModel, probe: Probe) -> _Output:
    """A decoder of ours returns no layer's output, so the first layer's is compared after the model's norm and head."""
    first = probe.own.first_layer
    first = first if len(probe.layers) == 1 else module.model.norm(first)
    return replace(probe.own, first_layer=module.lm_head(first))


def _with_joined_weights(
    config: ModelConfig,
    model: LoadedModel,
    read_again: Callable[[], PreTrainedModel],
    *,
    block_size: int,
    mapped: MappedModel | None,
    ranks: RankGroup | None,
) -> LoadedModel:
    """The model for the decoder for CUDA, if that computes what the model computes; else as it is.

    read_again: reads the module, which loses its weights here.
    mapped: has them, where the module does not hold them.
    ranks: all call it; where one finds a difference, none has the decoder for CUDA.
    """
    module, probe = model.module, model.probe
    assert module is not None, "it is joined from transformers' weights"
    assert probe is not None, "it is compared with them"
    reason = _why_not_joined(config, module, probe.rules)
    if reason is not None:
        if config.quantization != "none":
            raise _not_quantised(config, reason)
        logger.info("%s runs on transformers' code: %s", config.path, reason)
        return model
    probe = replace(probe, own=_with_first_logits(module, probe))
    settings = _joined_settings(module, probe.rules, probe.own, model.group)
    num_positions = max(model.facts.max_model_len, _PROBE_TOKENS)
    weights = join_weights(
        module, settings, num_positions=num_positions, quantised=config.quantization == "fp8", mapped=mapped
    )
    joined = replace(model, module=None, joined=weights, probe=probe)
    difference = _difference(_computed_at_load(joined, probe, block_size), probe.own, config.quantization)
    if ranks is not None and not ranks.minimum(int(difference is None)):
        difference = difference or "the output differs on another rank"
    if difference is None:
        return replace(joined, adapters=_slots_for_adapters(config, weights, model.group))
    if config.quantization != "none":
        raise _not_quantised(config, difference)
    logger.warning("%s runs on transformers' code, slower: in the decoder for CUDA %s", config.path, difference)
    del weights, joined  # before the same weights are read again
    return replace(model, module=read_again())


def _slots_for_adapters(config: ModelConfig, weights: JoinedWeights, group: Exchange | None) -> AdapterSlots | None:
    """None where no number of adapters is set: their memory is taken whether or not any is loaded."""
    if config.max_loaded_adapters is None or group is not None:
        return None
    return AdapterSlots(weights, config.max_loaded_adapters)


def _joined_settings(
    module: PreTrainedModel, rules: dict[int, AttentionRules], own: _Output, group: Exchange | None
) -> DecoderSettings:
    """own: what the module gives; its output layer may be one rank's part."""
    settings = replace(settings_of(module, rules), vocab_size=own.logits.shape[-1])
    return settings if group is None else settings.of_rank(group.size)


def _why_not_joined(config: ModelConfig, module: PreTrainedModel, rules: dict[int, AttentionRules]) -> str | None:
    reason = why_not_llama_like(module) or why_attention_is_not_llama_like(module, rules)
    return why_not_in_fp8(module) if reason is None and config.quantization == "fp8" else reason


def _computed_at_load(model: LoadedModel, probe: Probe, block_size: int) -> _Output:
    """The probe's tokens in one piece, with KV memory of their own."""
    num_blocks = -(-_PROBE_TOKENS // block_size)
    attention = TritonAttention(
        model.layers,
        num_blocks=num_blocks,
        block_size=block_size,
        max_rows=1,
        max_blocks=num_blocks,
        dtype=model.dtype,
        device=model.device,
    )
    token_ids = tuple(probe.token_ids[0].tolist())
    piece = ScheduledSequence("check", token_ids, 0, list(range(num_blocks)), True, _GREEDY)
    return _computed(model, attention, piece)


def _relative_difference(mine: torch.Tensor, theirs: torch.Tensor, *, by_token: bool) -> float:
    """by_token: the difference that three quarters of the tokens keep to, instead of that of all together.

    In bfloat16 two experts are often all but equally good, and rounding takes another one for some tokens.
    """
    dims = (-1,) if by_token else None
    difference = torch.linalg.vector_norm(mine.float() - theirs.float(), dim=dims)
    relative = difference / torch.linalg.vector_norm(theirs.float(), dim=dims).clamp_min(1e-9)
    return float(relative.quantile(0.75))


def eos_token_ids(module: PreTrainedModel) -> tuple[int, ...]:
    """The tokens that end generation: the generation config's, else the model config's."""
    generation = getattr(module, "generation_config", None)
    found = getattr(generation, "eos_token_id", None)
    if found is None:
        found = module.config.get_text_config().eos_token_id
    return as_token_ids(found)
