"""Constants of the attention kernels for each GPU architecture. No speed is measured yet.

The constants follow from the registers and the shared memory that the compiler reports for bfloat16 kernels at the
sizes of Llama and Gemma. The rules are: no register is spilled; two tiles of keys and values load while a third is
computed; at least two decode programs fit on a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTuning:
    """The options that the attention kernels are compiled with."""

    decode_warps: int = 4  # a tile has 16 rows of queries, the height of a matrix instruction; each warp takes 16 keys
    decode_stages: int = 3  # tiles in flight: two load while one is computed
    prefill_rows: int = 128  # tokens times query heads of one KV head, in a tile of 16-bit numbers
    prefill_warps: int = 8  # 4 warps have too few registers for 128 rows, and on sm_80 for 64 rows
    prefill_stages: int = 3
    max_outputs: int  # rows times value_dim of a tile: outputs stay in registers, and more outputs would be spilled
    tile_bytes: int = 32 * 1024  # keys and values of a tile, which is 64 keys at a head size of 128

    def rows(self, value_dim: int, *, is_padded: bool = False, in_fp8: bool = False) -> int:
        """Return the rows of a prefill tile. Masks of padded head sizes and the conversion from FP8 take registers.

        is_padded: whether head sizes are no powers of two.
        """
        return min(self.prefill_rows, self.max_outputs // (value_dim << is_padded << in_fp8))


# Hopper (sm_90) has 227 KiB of shared memory. Two warpgroups multiply 64 rows each. Their products read queries and
# keys from shared memory, which leaves registers for 128 rows of 256 outputs.
_SM_90 = KernelTuning(max_outputs=128 * 256)
# Ampere (sm_80) has 163 KiB. Products read their operands from registers, so only half of the outputs fit.
_SM_80 = replace(_SM_90, max_outputs=128 * 128)
# Ampere, Ada and Blackwell of workstations (sm_86, sm_89, sm_120) have 99 KiB, and products as on sm_80. Only one tile
# loads ahead, so that two decode programs fit side by side and a prefill tile fits at a head size of 256.
_SMALL = replace(_SM_80, decode_stages=2, prefill_stages=2)
# Blackwell (sm_100, sm_103) has 227 KiB like Hopper. Outputs lie in tensor memory while they are summed up.
_TUNING = {(8, 0): _SM_80, (9, 0): _SM_90, (10, 0): _SM_90, (10, 3): _SM_90}


def tuning_for(device: torch.device) -> KernelTuning:
    """Return the constants for a device. Without CUDA, a plan gets those of an H100, the card of most replicas."""
    return tuning_of(torch.cuda.get_device_capability(device)) if device.type == "cuda" else _SM_90


def tuning_of(capability: tuple[int, int]) -> KernelTuning:
    """Return the constants for a compute capability. An unknown one gets those that need the least shared memory."""
    return _TUNING.get(capability, _SMALL)
