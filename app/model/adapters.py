"""Reads LoRA adapters in PEFT's format and checks that they fit the served model. Never runs an adapter's code."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, cast

import torch
from pydantic import BaseModel, ConfigDict, FiniteFloat, PositiveInt, ValidationError

from app.engine.batch import StepBatch
from app.errors import UnsupportedAdapter, first_line
from app.model.adapter_files import CONFIG, WEIGHTS
from app.model.architectures import Names
from app.model.inputs import to_device
from app.model.language_model import plain_name
from app.model.llama import QUERIES_KEYS_VALUES, DecoderSettings, LayerSettings

MAX_RANK = 64


def products_of(names: Names) -> dict[str, tuple[str, ...]]:
    """Return the linear layers that our decoders compute in one matrix product, by the product's name."""
    return {
        "query_key_value": QUERIES_KEYS_VALUES,
        "output": (names.attention_output,),
        "gate_up": (names.gate, names.up),
        "down": (names.down,),
    }


PRODUCTS = products_of(Names())  # the names in Llama itself
_TENSOR = re.compile(r"base_model\.model\.(?P<linear>.+)\.lora_(?P<factor>[AB])(?:\.default)?\.weight")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)  # the types accepted in adapter files
_MAX_CONFIG_BYTES = 1 << 20
_NAME = re.compile(r"\^?(?:[\w-]|\\?\.)+\$?", re.ASCII)  # unambiguous, so matching takes linear time


class Sizes(NamedTuple):
    num_inputs: int
    num_outputs: int


@dataclass(frozen=True, slots=True)
class LowRankUpdate:
    """The low-rank product that an adapter adds to a linear layer's output: inputs × down × up."""

    down: torch.Tensor  # [rank, num_inputs]
    up: torch.Tensor  # [num_outputs, rank]; includes the adapter's scale

    @property
    def rank(self) -> int:
        return self.down.shape[0]


AdapterWeights = Mapping[str, LowRankUpdate]  # by the linear layer's name in the model


@dataclass(frozen=True, slots=True)
class SlottedAdapter:
    """An adapter in a slot of GPU memory. Scheduled sequences carry it as `adapter`."""

    slot: int


class LlamaLayer(Protocol):
    """The attributes of our decoders' layers that this module reads."""

    @property
    def router(self) -> torch.Tensor | None:
        """The router, or None if the layer has no experts."""
        ...


def linear_sizes(settings: DecoderSettings, layers: Sequence[LlamaLayer]) -> dict[str, Sizes]:
    """Return the sizes of the linear layers that adapters may change: in attention, and in MLPs without experts."""
    return {
        linear_name(index, linear): size
        for index, (layer, own) in enumerate(zip(layers, settings.layers, strict=True))
        for linear, size in {
            **(_sizes_of_attention(settings, own) if own.mixer == "attention" else {}),
            **(_sizes_of_mlp(settings, own) if layer.router is None else {}),
        }.items()
    }


def linear_name(layer: int, linear: str) -> str:
    return f"model.layers.{layer}.{linear}"


def is_divided_by_inputs(linear: str) -> bool:
    """Return whether tensor parallelism splits the linear layer by inputs. All other layers are split by outputs."""
    return linear.endswith(("o_proj", "down_proj"))


def whole_size(linear: str, own: Sizes, num_ranks: int) -> Sizes:
    """Return the size of the undivided linear layer, given the size of one rank's part."""
    if is_divided_by_inputs(linear):
        return own._replace(num_inputs=own.num_inputs * num_ranks)
    return own._replace(num_outputs=own.num_outputs * num_ranks)


def part_of_rank(weights: AdapterWeights, rank: int, num_ranks: int) -> AdapterWeights:
    """Return one rank's part of an adapter: for each linear layer, a share of A's inputs or of B's outputs."""

    def part(linear: str, update: LowRankUpdate) -> LowRankUpdate:
        if is_divided_by_inputs(linear):
            return replace(update, down=update.down.chunk(num_ranks, 1)[rank].contiguous())
        return replace(update, up=update.up.chunk(num_ranks)[rank].contiguous())

    return {linear: part(linear, update) for linear, update in weights.items()}


def save_part(path: Path, part: AdapterWeights) -> None:
    """Write one rank's part to a file, so that another process can load it with `read_part`."""
    from safetensors.torch import save_file

    named = {linear: (update.down, update.up) for linear, update in part.items()}
    save_file({f"{linear} {at}": factor for linear, pair in named.items() for at, factor in enumerate(pair)}, path)


def read_part(path: Path) -> AdapterWeights:
    from safetensors.torch import load_file

    factors = load_file(path)
    linears = {name.partition(" ")[0] for name in factors}
    return {linear: LowRankUpdate(factors[f"{linear} 0"], factors[f"{linear} 1"]) for linear in linears}


def products(settings: DecoderSettings) -> Iterator[tuple[int, str, list[str]]]:
    """Yield (layer, product name, names of the joined linear layers) for each product of each layer."""
    own = products_of(settings.described.names)
    for layer in range(len(settings.layers)):
        for product, linears in own.items():
            yield layer, product, [linear_name(layer, linear) for linear in linears]


def _sizes_of_attention(settings: DecoderSettings, layer: LayerSettings) -> dict[str, Sizes]:
    hidden, linears = settings.hidden_size, layer.attention_linears
    outputs = (settings.query_outputs(layer), layer.kv_size, layer.kv_size)[: len(linears)]
    inputs = {linear: Sizes(hidden, size) for linear, size in zip(linears, outputs, strict=True)}
    return inputs | {settings.described.names.attention_output: Sizes(settings.num_heads * layer.head_dim, hidden)}


def _sizes_of_mlp(settings: DecoderSettings, layer: LayerSettings) -> dict[str, Sizes]:
    hidden, inner, names = settings.hidden_size, layer.intermediate_size, settings.described.names
    return {names.gate: Sizes(hidden, inner), names.up: Sizes(hidden, inner), names.down: Sizes(inner, hidden)}


class PeftConfig(BaseModel):
    """The fields of adapter_config.json that affect inference. The other fields concern training and are ignored."""

    model_config = ConfigDict(extra="allow")

    peft_type: str
    r: PositiveInt
    lora_alpha: FiniteFloat = 8.0
    use_rslora: bool = False
    rank_pattern: dict[str, PositiveInt] = {}
    alpha_pattern: dict[str, FiniteFloat] = {}
    bias: str = "none"

    def why_not(self) -> str | None:
        """Describe the first unsupported feature. Returns None if all are supported."""
        if self.peft_type != "LORA":
            return f"peft_type is {self.peft_type[:40]}; only LORA is supported"
        if self.bias != "none":
            return f"bias is {self.bias[:40]}; only adapters without biases are supported"
        refused = (
            "use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "layer_replication", "target_parameters",
            "trainable_token_indices", "alora_invocation_tokens", "use_qalora",
        )  # fmt: skip
        wrong = [name for name in refused if (self.model_extra or {}).get(name)]
        return f"it uses {', '.join(wrong)}, which is not supported" if wrong else None


class _ByLayer:
    """Looks up `rank_pattern` or `alpha_pattern` by linear layer. The first key that matches a layer wins.

    PEFT treats a key as a regular expression that matches the end of a layer's name. An expression from an untrusted
    file could run for hours while holding the GIL, so keys are never compiled. Only names, ends of names and
    alternatives of these are accepted, and they are looked up in a dictionary.
    """

    def __init__(self, field: str, pattern: Mapping[str, float], default: float) -> None:
        """Raises UnsupportedAdapter if a key is any other regular expression."""
        self._default = default
        self._values: dict[str, tuple[int, float]] = {}  # end of a name, or ^name → (index of the key, value)
        for place, (key, value) in enumerate(pattern.items()):
            for end in _ends(field, key):
                self._values.setdefault(end, (place, value))

    def value_of(self, linear: str) -> float:
        parts = linear.split(".")
        ends = [f"^{linear}", *(".".join(parts[at:]) for at in range(len(parts)))]
        found = [self._values[end] for end in ends if end in self._values]
        return min(found)[1] if found else self._default


def _ends(field: str, key: str) -> list[str]:
    """Split a key into ends of names: `(q_proj|mlp\\.up_proj)` → `q_proj`, `mlp.up_proj`."""
    names = key.removeprefix("(").removesuffix(")").split("|") if key[:1] + key[-1:] == "()" else key.split("|")
    if not all(map(_NAME.fullmatch, names)):
        raise UnsupportedAdapter(
            f"{CONFIG}: {field} has {key[:120]!r}; only names of layers, ends of names and alternatives of these are "
            "supported, such as q_proj, self_attn.q_proj or q_proj|k_proj, but no other regular expressions"
        )
    return [name.removesuffix("$").replace("\\.", ".") for name in names]


class LinearUpdates:
    """Applies adapters to transformers' modules, with hooks that add each row's update to a linear layer's output."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._linears: dict[str, torch.nn.Module] = {}
        self.sizes: dict[str, Sizes] = {}
        weight = next(module.parameters())
        self._dtype, self._device = weight.dtype, weight.device
        self._late: list[dict[str, LowRankUpdate]] | None = None  # loaded while the device is suspended
        for name, linear in module.named_modules():
            inputs, outputs = getattr(linear, "in_features", None), getattr(linear, "out_features", None)
            parent = module.get_submodule(name.rpartition(".")[0])
            is_called = not (name.endswith(".kv_b_proj") and hasattr(parent, "latent_heads"))
            if name.endswith("_proj") and is_called and isinstance(inputs, int) and isinstance(outputs, int):
                self.sizes[name] = Sizes(inputs, outputs)
                self._linears[name] = linear

    def prepare(self, weights: AdapterWeights) -> AdapterWeights:
        """Move an adapter to the model's device and type. Scheduled sequences carry the result as `adapter`."""
        device = self._device if self._late is None else torch.device("cpu")
        to = partial(torch.Tensor.to, device=device, dtype=self._dtype)
        adapter = {name: LowRankUpdate(to(each.down), to(each.up)) for name, each in weights.items()}
        if self._late is not None:
            self._late.append(adapter)
        return adapter

    def suspend_device(self) -> None:
        """Prepare new adapters in host memory until `resume` is called. Adapters on the device stay there."""
        self._late = []

    def resume(self) -> None:
        """Move the adapters that were loaded since `suspend_device` to the device."""
        late, self._late = self._late or [], None
        for adapter in late:
            adapter |= self.prepare(adapter)

    def most_bytes(self, number: int, num_tokens: int) -> int:
        """Return the most bytes that a step and `number` adapters of rank `MAX_RANK` need.

        Includes a removed adapter that is still in use.
        """
        if not self.sizes:
            return 0
        of_one = MAX_RANK * sum(each.num_inputs + each.num_outputs for each in self.sizes.values())
        of_token = max(each.num_inputs + 2 * each.num_outputs for each in self.sizes.values())
        return ((number + 1) * of_one + num_tokens * of_token) * self._dtype.itemsize

    @contextmanager
    def of(self, batch: StepBatch) -> Iterator[None]:
        """Apply the batch's adapters to each forward pass inside the `with` block."""
        with ExitStack() as hooks:
            for name, parts in self._parts_by_linear(batch).items():
                hooks.callback(self._linears[name].register_forward_hook(partial(_add, parts)).remove)
            yield

    def _parts_by_linear(self, batch: StepBatch) -> dict[str, list[tuple[LowRankUpdate, torch.Tensor]]]:
        """Return each linear layer's updates, paired with the indices of the tokens that they apply to."""
        found: dict[str, list[tuple[LowRankUpdate, torch.Tensor]]] = {}
        for adapter, places in tokens_by_adapter(batch) if batch.has_adapters else ():
            tokens = to_device(places, self._device)
            for name, update in cast(AdapterWeights, adapter).items():
                found.setdefault(name, []).append((update, tokens))
        return found


def _add(
    parts: Sequence[tuple[LowRankUpdate, torch.Tensor]],
    _linear: torch.nn.Module,
    given: tuple[torch.Tensor, ...],
    output: torch.Tensor,
) -> None:
    """Add the updates to `output` in place. given, output: [1, num_tokens, features] or [num_tokens, features]."""
    for update, tokens in parts:
        rows = given[0].view(-1, given[0].shape[-1])[tokens]
        output.view(-1, output.shape[-1])[tokens] += rows @ update.down.T @ update.up.T


def tokens_by_adapter(batch: StepBatch) -> list[tuple[object, list[int]]]:
    """Return the adapters of a step, each with the ascending indices of its tokens in the packed row."""
    found: dict[int, tuple[object, list[int]]] = {}
    end = 0
    for item in batch.scheduled:
        begin, end = end, end + len(item.token_ids)
        if item.adapter is not None:
            found.setdefault(id(item.adapter), (item.adapter, []))[1].extend(range(begin, end))
    return list(found.values())


def read_adapter(folder: Path, linears: Mapping[str, Sizes]) -> AdapterWeights:
    """Read an adapter and check that it fits a model. linears: the model's adaptable linear layers by name.

    Raises UnsupportedAdapter if the adapter is made for another model or needs an unsupported feature.
    """
    try:
        return _read(folder, linears)
    except UnsupportedAdapter as error:
        raise UnsupportedAdapter(f"the adapter {folder} cannot be used: {error.message:.1000}") from None


def _read(folder: Path, linears: Mapping[str, Sizes]) -> AdapterWeights:
    config = _read_config(folder)
    if (reason := config.why_not()) is not None:
        raise UnsupportedAdapter(reason)
    pairs = _pairs(_read_tensors(folder))
    own = {plain_name(linear): linear for linear in linears}  # adapters of multimodal models add a prefix
    missing = [linear for linear in pairs if plain_name(linear) not in own]
    if missing:
        unknown, known = (sorted({linear.rpartition(".")[2] for linear in each}) for each in (missing, linears))
        raise UnsupportedAdapter(
            f"it changes {', '.join(unknown):.200} ({missing[0]:.120}), which adapters cannot change in this model; "
            f"they can only change existing layers named {', '.join(known)}"
        )
    ranks = _ByLayer("rank_pattern", config.rank_pattern, config.r)
    alphas = _ByLayer("alpha_pattern", config.alpha_pattern, config.lora_alpha)
    updates: dict[str, LowRankUpdate] = {}
    for linear, factors in pairs.items():
        rank = int(ranks.value_of(linear))
        name = own[plain_name(linear)]
        _check_factors(linear, factors, linears[name], rank)
        # rsLoRA (Kalajdzievski, 2023) divides by the square root of the rank.
        scale = alphas.value_of(linear) / (math.sqrt(rank) if config.use_rslora else rank)
        updates[name] = _update(linear, factors, scale)
    return updates


def _read_config(folder: Path) -> PeftConfig:
    try:
        with (folder / CONFIG).open("rb") as file:
            text = file.read(_MAX_CONFIG_BYTES + 1)
        if len(text) > _MAX_CONFIG_BYTES:
            raise UnsupportedAdapter(f"{CONFIG} has more than {_MAX_CONFIG_BYTES:,} bytes")
        return PeftConfig.model_validate(json.loads(text))
    except OSError as error:
        raise UnsupportedAdapter(f"{CONFIG} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise UnsupportedAdapter(f"{CONFIG}: {where}: got {first['input']!r:.60}; {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise UnsupportedAdapter(f"{CONFIG} is not valid JSON: {first_line(error)}") from error


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors: dict[str, torch.Tensor] = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UnsupportedAdapter(f"{WEIGHTS} cannot be read: {first_line(error)}") from error
    return tensors


def _pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Return the factors A and B by linear layer. Raises UnsupportedAdapter if a factor is missing or unknown."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in sorted(tensors.items()):
        match = _TENSOR.fullmatch(name)
        if match is None:
            raise UnsupportedAdapter(f"{WEIGHTS} has {name[:120]}, which is not a factor of a LoRA update")
        pairs.setdefault(match["linear"], {})[match["factor"]] = tensor
    for linear, factors in pairs.items():
        if len(factors) < 2:
            raise UnsupportedAdapter(f"{linear[:120]} has only lora_{next(iter(factors))}, without its other factor")
    if not pairs:
        raise UnsupportedAdapter(f"{WEIGHTS} is empty")
    return pairs


def _check_factors(linear: str, factors: Mapping[str, torch.Tensor], sizes: Sizes, rank: int) -> None:
    """Raise UnsupportedAdapter if a shape or type is wrong. Reads only the tensors' metadata, not their numbers."""
    down, up = factors["A"], factors["B"]
    if rank > MAX_RANK:
        raise UnsupportedAdapter(f"{linear} has rank {rank}; at most {MAX_RANK} is supported")
    found, wanted = (tuple(down.shape), tuple(up.shape)), ((rank, sizes.num_inputs), (sizes.num_outputs, rank))
    if found != wanted:
        raise UnsupportedAdapter(
            f"{linear} has factors of {_shape(found[0])} and {_shape(found[1])}; with rank {rank}, this model needs "
            f"{_shape(wanted[0])} and {_shape(wanted[1])}: it is for another model, or {CONFIG} is for another adapter"
        )
    for factor in (down, up):
        if factor.dtype not in _DTYPES:
            raise UnsupportedAdapter(f"{linear} has numbers of type {factor.dtype}, which is not supported")


def _update(linear: str, factors: Mapping[str, torch.Tensor], scale: float) -> LowRankUpdate:
    """Return scaled factors. Copies them, because they are memory-mapped from a file that may change while in use."""
    down, up = (factors[name].to(torch.float32, copy=True) for name in "AB")
    up *= scale
    if not (down.isfinite().all() and up.isfinite().all()):
        raise UnsupportedAdapter(f"{linear} has numbers that are not finite, or not finite after scaling by {scale:g}")
    return LowRankUpdate(down, up)


def _shape(sizes: tuple[int, ...]) -> str:
    return " × ".join(map(str, sizes[:4]))
