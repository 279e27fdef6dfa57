"""The memory of one replica of a model on a GPU, divided as the replica divides it when it starts."""

from __future__ import annotations

from pydantic import ValidationError

from app.assembly import PlannedMemory, planned_memory
from app.config import GIB, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from app.errors import InvalidSetup
from app.model.memory import GpuMemory
from deployments.plan.cards import CARDS, Card


class GpuPlan:
    """What one replica has on a card. Takes seconds: the largest step is walked through without numbers."""

    def __init__(self, config: EngineConfig, card: Card, *, share: float, num_ranks: int = 1) -> None:
        """share: of the card, as `replicas.num_gpus`. num_ranks: cards, as `replicas.tensor_parallel`.

        Raises InvalidSetup as `planned_memory` does.
        """
        self._config = config
        self._card = card
        self._share = share
        self._num_ranks = num_ranks
        self._planned: PlannedMemory = planned_memory(config, num_ranks=num_ranks)

    def table(self) -> str:
        """All parts in GiB, and what the rest holds; for a terminal."""
        needs, gpu = self._planned.needs, self._on(self._card)
        left = gpu.left_for_kv(needs)
        rows = [
            ("weights", needs.weights),
            ("largest step", needs.step),
            ("CUDA graphs", needs.graphs),
            ("workspaces", needs.workspaces),
            ("CUDA context", needs.context),
            ("KV memory", max(0, left)),
        ]
        head = (
            f"{self._config.model.path} on {self._where}: {gpu.granted / GIB:.2f} GiB, "
            f"{gpu.fraction:g} of {self._share * gpu.total / GIB:.2f} GiB (predicted; not yet measured on a GPU)"
        )
        lines = [head, *(f"  {name:<14}{num_bytes / GIB:>9.2f} GiB" for name, num_bytes in rows)]
        return "\n".join([*lines, *self._room(left)])

    def check(self) -> None:
        """Raises InvalidSetup if no sequence of the whole context fits, with the smallest card that holds one."""
        needed = self._bytes_of_sequence
        missing = needed - self._on(self._card).left_for_kv(self._planned.needs)
        if missing <= 0:
            return
        fitting = [card for card in CARDS if self._on(card).left_for_kv(self._planned.needs) >= needed]
        smallest = min(fitting, key=lambda card: card.memory_gib, default=None)
        raise InvalidSetup(
            f"{self._config.model.path} does not fit on {self._where}: {missing / GIB:.2f} GiB are missing for one "
            f"sequence of {self._planned.context:,} tokens. "
            + (
                f"The smallest card that holds it is {smallest.name} ({smallest.memory_gib:g} GiB)"
                if smallest is not None
                else f"None of the known cards holds it; the largest is {CARDS[-1].name} ({CARDS[-1].memory_gib:g} GiB)"
            )
            + "; or lower --context, --max-running or --max-step-tokens, or divide it (--tensor-parallel)"
        )

    def _room(self, left: int) -> list[str]:
        planned = self._planned
        num_tokens = max(0, left) // planned.block_bytes * planned.block_size
        num_sequences = num_tokens // planned.context
        lines = [
            f"  {planned.block_bytes // planned.block_size:,} bytes of KV a token: room for {num_tokens:,} tokens, "
            f"{num_sequences:,} sequences of {planned.context:,}"
        ]
        if self._card.bandwidth_gbs is not None and num_sequences:
            running = min(num_sequences, self._config.scheduler.max_running)
            read = planned.needs.weights + running * self._bytes_of_sequence
            lines.append(
                f"  {running:,} of them in a decode step read {read / GIB:.1f} GiB: at least "
                f"{read / self._card.bandwidth_gbs / 1e6:.1f} ms at {self._card.bandwidth_gbs:,g} GB/s"
            )
        return lines

    @property
    def _where(self) -> str:
        return self._card.name if self._num_ranks == 1 else f"each of {self._num_ranks} {self._card.name}"

    @property
    def _bytes_of_sequence(self) -> int:
        planned = self._planned
        return -(-planned.context // planned.block_size) * planned.block_bytes

    def _on(self, card: Card) -> GpuMemory:
        return GpuMemory(total=card.memory_bytes, fraction=self._config.cache.gpu_memory_fraction, share=self._share)


def config_of(
    path: str,
    *,
    context: int | None,
    dtype: str,
    max_running: int,
    max_step_tokens: int,
    gpu_memory_fraction: float,
) -> EngineConfig:
    """The settings of a replica on a GPU. Raises InvalidSetup."""
    try:
        return EngineConfig(
            model=ModelConfig.model_validate({"path": path, "dtype": dtype, "max_model_len": context}),
            cache=CacheConfig(gpu_memory_fraction=gpu_memory_fraction),
            scheduler=SchedulerConfig(max_running=max_running, max_step_tokens=max_step_tokens),
        )
    except ValidationError as error:
        reasons = (f"{'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())
        raise InvalidSetup("; ".join(reasons)) from error
