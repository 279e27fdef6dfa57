"""Compile options of the attention kernels for each GPU architecture. Their speed has not been measured yet.

The options follow from the registers and the shared memory that the compiler reports for bfloat16 kernels at the sizes
of Llama and Gemma. They are chosen so that no register is spilled, two tiles of keys and values load while a third is
computed, and at least two decode programs fit on a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTuning:
    """The options that the attention kernels are compiled with."""

    decode_warps: int = 4  # each warp computes 16 keys; 16 rows of queries are the height of a matrix instruction
    decode_stages: int = 3  # tiles in flight: two load while one is computed
    prefill_rows: int = 128  # rows of a tile in 16 bits: tokens times the query heads of one KV head
    prefill_warps: int = 8  # 4 warps have too few registers for 128 rows, and on sm_80 even for 64 rows
    prefill_stages: int = 3
    max_outputs: int  # limit for rows * value_dim of a tile: outputs stay in registers, and more would be spilled
    tile_bytes: int = 32 * 1024  # limit for keys and values of a tile; 64 keys at a head size of 128

    def rows(self, value_dim: int, *, is_padded: bool = False, in_fp8: bool = False) -> int:
        """Return the rows of a prefill tile. Masks of padded heads and the conversion from FP8 also need registers.

        is_padded: whether a head size is not a power of two.
        """
        return min(self.prefill_rows, self.max_outputs // (value_dim << is_padded << in_fp8))


# Hopper (sm_90) has 227 KiB of shared memory. Two warpgroups multiply 64 rows each and read queries and keys from
# shared memory, which leaves registers for 128 rows of 256 outputs.
_SM_90 = KernelTuning(max_outputs=128 * 256)
# Ampere (sm_80) has 163 KiB. Its products read operands from registers, so only half as many outputs fit.
_SM_80 = replace(_SM_90, max_outputs=128 * 128)
# Ampere, Ada and Blackwell in workstations (sm_86, sm_89, sm_120) have 99 KiB, and products as on sm_80. Only one tile
# is loaded ahead, so that two decode programs fit side by side, and a prefill tile with a head size of 256 fits.
_SMALL = replace(_SM_80, decode_stages=2, prefill_stages=2)
# Blackwell (sm_100, sm_103) has 227 KiB like Hopper, and sums up outputs in its tensor memory.
_TUNING = {(8, 0): _SM_80, (9, 0): _SM_90, (10, 0): _SM_90, (10, 3): _SM_90}


def tuning_for(device: torch.device) -> KernelTuning:
    """Return the options for a device. Without CUDA, return the options for an H100, the card of most replicas."""
    return tuning_of(torch.cuda.get_device_capability(device)) if device.type == "cuda" else _SM_90


def tuning_of(capability: tuple[int, int]) -> KernelTuning:
    """Return the options for a compute capability. Unknown ones get the options that need the least shared memory."""
    return _TUNING.get(capability, _SMALL)
