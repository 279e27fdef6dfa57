"""KV memory in the layout of the C++ attention."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from app.model.cpu.library import DTYPES, LANES, Team, in_large_pages, library
from app.model.kv_cache import LayerShape
from app.model.memory import GIB

logger = logging.getLogger(__name__)


class NativeKVCache:
    """Blocks of every layer, in units of 32 bits: two neighbouring dimensions of bfloat16 keys, two tokens' values.

    Not zeroed: a slot is read only after its sequence has written it. `provide` has the system provide it.
    """

    def __init__(self, layers: dict[int, LayerShape], *, num_blocks: int, block_size: int, dtype: torch.dtype) -> None:
        """`fits` must hold."""
        self.block_size = block_size
        self.dtype = dtype
        self.keys: dict[int, torch.Tensor] = {}  # by layer: [num_blocks, num_kv_heads, key_units, block_size] units
        self.values: dict[int, torch.Tensor] = {}  # [num_blocks, num_kv_heads, token_units, value_dim] units
        per_unit = 4 // dtype.itemsize
        for index, layer in layers.items():
            blocks = (num_blocks, layer.num_kv_heads)
            self.keys[index] = in_large_pages(*blocks, layer.key_dim // per_unit, block_size, dtype=torch.int32)
            self.values[index] = in_large_pages(*blocks, block_size // per_unit, layer.value_dim, dtype=torch.int32)

    def provide(self, team: Team) -> None:
        """Have the system provide all of it now, so that a process does not grow and no memory limit is met later.

        With a warning, it is left to be provided as it is used where the machine has less: it could swap.
        """
        tensors = [*self.keys.values(), *self.values.values()]
        num_bytes, available = sum(tensor.nbytes for tensor in tensors), _available_bytes()
        if available is not None and num_bytes > available:
            logger.warning(
                "KV memory is %.2f GiB, of which the machine has %.2f GiB now; it will run out if all of it is used. "
                "Set a smaller cache.memory_gib",
                num_bytes / GIB, available / GIB,
            )  # fmt: skip
            return
        for tensor in tensors:
            team.code.carousel_touch(team.handle, tensor.data_ptr(), tensor.nbytes)

    @staticmethod
    def fits(layers: dict[int, LayerShape], *, block_size: int, dtype: torch.dtype, device: torch.device) -> bool:
        """Whether this machine and these shapes can use it."""
        shapes_fit = block_size % LANES == 0 and all(
            layer.value_dim % LANES == 0 and layer.key_dim % 2 == 0 for layer in layers.values()
        )
        return device.type == "cpu" and dtype in DTYPES and shapes_fit and library() is not None


def _available_bytes() -> int | None:
    """Memory that can be used without swapping, as Linux estimates it; None elsewhere."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)
