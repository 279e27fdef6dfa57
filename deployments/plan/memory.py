"""Predicts how a replica uses the memory of a GPU or a CPU, and how many tokens fit in its KV memory."""

from __future__ import annotations

from typing import Any

from app.config import GIB, EngineConfig
from app.cores import available_memory
from app.errors import InvalidSetup
from app.model.cuda.fp8 import LEAST_CAPABILITY
from app.model.memory import GpuMemory
from app.model.planned_memory import PlannedAdapters, PlannedMemory, planned_cpu_memory, planned_memory
from deployments.plan.cards import CARDS, Card, bytes_of
from deployments.serve.settings import validated


class GpuPlan:
    """A replica's memory on a card. Creating a plan takes seconds, because the largest step runs on the meta device."""

    def __init__(self, config: EngineConfig, card: Card, *, share: float, num_ranks: int = 1) -> None:
        """`share` is the replica's share of the card (`replicas.num_gpus`); `num_ranks` is `replicas.tensor_parallel`.

        Raises InvalidSetup like `planned_memory`, or if the card does not support a dtype in the config.
        """
        self._config = config
        self._card = card
        self._share = share
        self._num_ranks = num_ranks
        if config.cache.dtype == "int8":
            raise InvalidSetup("--cache-dtype int8 is only supported on CPUs; GPUs support fp8")
        if not self._computes_on(card):
            needed = ".".join(map(str, LEAST_CAPABILITY))
            raise InvalidSetup(
                f"{' and '.join(self._in_fp8)} fp8: {card.name} does not support FP8, which requires compute "
                f"capability {needed} or higher"
            )
        self._planned: PlannedMemory = planned_memory(config, num_ranks=num_ranks)
        if config.model.max_loaded_adapters is not None and not self._planned.needs.adapters:
            raise InvalidSetup(
                f"--adapters: {config.model.path} on {self._where} does not support adapters, because the model has no "
                f"linear layers with names that end in _proj"
            )

    def table(self) -> str:
        """Return a table for a terminal: each use of memory in GiB, and the tokens and sequences that fit."""
        needs, gpu = self._planned.needs, self._on(self._card)
        num_slots, left = self._slots_and_kv_on(self._card)
        rows = [
            ("weights", needs.weights),
            *([("adapters", needs.adapters)] if needs.adapters else ()),
            ("largest step", needs.step),
            ("CUDA graphs", needs.graphs),
            ("workspaces", needs.workspaces),
            ("CUDA context", needs.context),
            *([("states", num_slots * self._planned.state_bytes)] if num_slots else ()),
            ("KV memory", max(0, left)),
        ]
        head = (
            f"{self._config.model.path} on {self._where}: {gpu.granted / GIB:.2f} GiB, "
            f"{gpu.fraction:g} of {self._share * gpu.total / GIB:.2f} GiB (predicted; not yet measured on a GPU)"
        )
        lines = [*_lines(rows), *_slots(self._planned, num_slots), *self._room(left)]
        return "\n".join([head, *lines, f"  {self._planned.abilities}"])

    def check(self) -> None:
        """Raise InvalidSetup, with the smallest suitable card, if not even one sequence of full length fits."""
        needed = self._planned.sequence_bytes
        missing = needed - self._slots_and_kv_on(self._card)[1]
        if missing <= 0:
            return
        fitting = [card for card in CARDS if self._computes_on(card) and self._slots_and_kv_on(card)[1] >= needed]
        smallest = min(fitting, key=lambda card: card.memory_gib, default=None)
        raise InvalidSetup(
            f"{_does_not_fit(self._config, self._where, missing, self._planned)}. "
            + (
                f"The smallest card on which it fits is {smallest.name} ({smallest.memory_gib:g} GiB)"
                if smallest is not None
                else f"It fits on no known card; the largest is {CARDS[-1].name} ({CARDS[-1].memory_gib:g} GiB)"
            )
            + "; or lower --context, --max-running or --max-step-tokens, or divide the model (--tensor-parallel)"
        )

    def _room(self, left: int) -> list[str]:
        planned, num_sequences = self._planned, _num_sequences(self._planned, left)
        lines = [_room(planned, left)]
        if self._card.bandwidth_gbs is not None and num_sequences:
            running = min(num_sequences, self._config.scheduler.max_running)
            read = planned.needs.weights + running * planned.sequence_bytes
            lines.append(
                f"  a decode step of {running:,} sequences reads {read / GIB:.1f} GiB: at least "
                f"{read / self._card.bandwidth_gbs / 1e6:.1f} ms at {self._card.bandwidth_gbs:,g} GB/s"
            )
        return lines

    @property
    def _where(self) -> str:
        return self._card.name if self._num_ranks == 1 else f"each of {self._num_ranks} {self._card.name}"

    @property
    def _in_fp8(self) -> list[str]:
        """The command line options that request FP8."""
        asked = {"--quantization": self._config.model.quantization, "--cache-dtype": self._config.cache.dtype}
        return [option for option, kind in asked.items() if kind == "fp8"]

    def _computes_on(self, card: Card) -> bool:
        """Return whether the card supports the dtypes in the config. Assumed for cards with unknown capability."""
        return not self._in_fp8 or (card.capability or LEAST_CAPABILITY) >= LEAST_CAPABILITY

    def _slots_and_kv_on(self, card: Card) -> tuple[int, int]:
        """Return the number of state slots, and the bytes left for KV memory (negative if the card is too small)."""
        left = self._on(card).left_for_kv(self._planned.needs)
        num_slots = self._planned.num_slots(self._config, left)
        return num_slots, left - num_slots * self._planned.state_bytes

    def _on(self, card: Card) -> GpuMemory:
        return GpuMemory(total=card.memory_bytes, fraction=self._config.cache.gpu_memory_fraction, share=self._share)


class CpuPlan:
    """The memory of replicas that run on the CPUs of one machine and share their weights."""

    def __init__(self, config: EngineConfig, memory: str, adapters: PlannedAdapters, *, num_replicas: int = 1) -> None:
        """`memory` is the machine's memory, such as 16GiB, or "" for the memory that is available on this machine.

        Raises InvalidSetup and UnsupportedModel like `planned_cpu_memory`.
        """
        if config.cache.dtype == "fp8":
            raise InvalidSetup("--cache-dtype fp8 is only supported on GPUs; CPUs support int8")
        num_bytes = bytes_of(memory, option="--cpu") if memory else available_memory()
        if num_bytes is None:
            raise InvalidSetup(
                "--cpu requires a size, such as --cpu 16GiB, because this system does not report its memory"
            )
        self._config = config
        self._where = f"a CPU with {num_bytes / GIB:.2f} GiB"
        self._planned: PlannedMemory = planned_cpu_memory(config, adapters, has_peers=num_replicas > 1)
        needs = self._planned.needs
        self._num_replicas = num_replicas
        self._given = (num_bytes - needs.weights) // num_replicas - (needs.total - needs.weights)
        self._num_slots = self._planned.num_slots(config, self._given)
        self._left = self._given - self._num_slots * self._planned.state_bytes

    def table(self) -> str:
        """Return a table for a terminal: each use of memory in GiB, and the tokens and sequences that fit."""
        needs = self._planned.needs
        of_each = "" if self._num_replicas == 1 else f" of each of {self._num_replicas} replicas"
        rows = [
            ("weights", needs.weights),
            (f"largest step{of_each}", needs.step),
            *([(f"adapters{of_each}", needs.adapters)] if needs.adapters else ()),
            (f"process{of_each}", needs.context),
            *([(f"states{of_each}", self._num_slots * self._planned.state_bytes)] if self._num_slots else ()),
            (f"KV memory{of_each}", max(0, self._left)),
        ]
        most, quantization = max(0, self._given * 100 // GIB) / 100, self._config.model.quantization
        kind = self._planned.dtype if quantization == "none" else quantization
        once = "" if self._num_replicas == 1 else ", once for all replicas"
        head = f"{self._config.model.path} on {self._where}, weights in {kind}{once} (predicted)"
        room = f"{_room(self._planned, self._left)} with cache.memory_gib: {most:g}"
        return "\n".join(
            [head, *_lines(rows), *_slots(self._planned, self._num_slots), room, f"  {self._planned.abilities}"]
        )

    def check(self) -> None:
        """Raise InvalidSetup if not even one sequence of full length fits."""
        missing = self._planned.sequence_bytes - self._left
        if missing > 0:
            smaller = "" if self._config.model.quantization == "int4" else "--quantization int8 or int4, or "
            fewer = "" if self._num_replicas == 1 else ", --replicas"
            raise InvalidSetup(
                f"{_does_not_fit(self._config, self._where, missing, self._planned)}; choose {smaller}a lower "
                f"--context, --max-running{fewer} or --max-step-tokens"
            )


def _lines(rows: list[tuple[str, int]]) -> list[str]:
    width = max(14, *(len(name) + 1 for name, _ in rows))
    return [f"  {name:<{width}}{num_bytes / GIB:>9.2f} GiB" for name, num_bytes in rows]


def _does_not_fit(config: EngineConfig, where: str, missing: int, planned: PlannedMemory) -> str:
    return (
        f"{config.model.path} does not fit on {where}: {missing / GIB:.2f} GiB are missing for one sequence of "
        f"{planned.context:,} tokens"
    )


def _num_tokens(planned: PlannedMemory, left: int) -> int:
    """Return the number of tokens that fit in `left` bytes of KV memory, assuming sequences of full length."""
    return max(0, left) * planned.context // planned.sequence_bytes


def _num_sequences(planned: PlannedMemory, left: int) -> int:
    return _num_tokens(planned, left) // planned.context


def _slots(planned: PlannedMemory, number: int) -> list[str]:
    if not number:
        return []
    return [
        f"  {number:,} slots of {planned.state_bytes / 2**20:.1f} MiB for the states of recurrent layers: two for each "
        f"running sequence, one for each snapshot"
    ]


def _room(planned: PlannedMemory, left: int) -> str:
    return (
        f"  {planned.sequence_bytes // planned.context:,} bytes of KV memory per token: room for "
        f"{_num_tokens(planned, left):,} tokens, {_num_sequences(planned, left):,} sequences of {planned.context:,}"
    )


def config_of(**branches: dict[str, Any]) -> EngineConfig:
    """Return an engine's settings, given by branch. None means the default. Raises InvalidSetup."""
    given = {
        name: {setting: value for setting, value in branch.items() if value is not None}
        for name, branch in branches.items()
    }
    return validated(EngineConfig, given)
