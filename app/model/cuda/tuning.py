"""Constants of the attention kernels for each architecture. Chosen by what the compiler says; none is measured yet.

Measured in registers and shared memory of bfloat16 kernels at Llama's and Gemma's sizes, the rules were: no spills; two
tiles of keys and values on their way while a third is computed; at least two decode programs for a multiprocessor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelTuning:
    """How the attention kernels are compiled."""

    decode_warps: int = 4  # 16 rows of queries: one matrix instruction high, a warp for each 16 keys
    decode_stages: int = 3  # tiles: two on their way while one is computed
    prefill_rows: int = 128  # tokens times query heads of one KV head in a tile of 16-bit numbers
    prefill_warps: int = 8  # 4 have too few registers for 128 rows, and on sm_80 for 64
    prefill_stages: int = 3
    max_outputs: int  # rows times value_dim of a tile: they stay in registers, and more would be spilled
    tile_bytes: int = 32 * 1024  # keys and values of one tile: 64 keys at a head size of 128

    def rows(self, value_dim: int, *, is_padded: bool = False, in_fp8: bool = False) -> int:
        """Of a prefill tile. is_padded: head sizes are no powers of two, and their masks take registers, too; so do
        keys and values in FP8, which are converted there.
        """
        return min(self.prefill_rows, self.max_outputs // (value_dim << is_padded << in_fp8))


# Hopper (sm_90): 227 KiB of shared memory. Two warpgroups multiply 64 rows each; their products read queries and keys
# from shared memory, which leaves registers for 128 rows of 256 outputs.
_SM_90 = KernelTuning(max_outputs=128 * 256)
# Ampere (sm_80): 163 KiB. Products read their operands from registers, so that half as many outputs fit.
_SM_80 = replace(_SM_90, max_outputs=128 * 128)
# Ampere and Ada of workstations (sm_86, sm_89), Blackwell of workstations (sm_120): 99 KiB. Products as on sm_80. One
# tile on its way: two decode programs fit side by side, and prefill of a head size of 256 fits at all.
_SMALL = replace(_SM_80, decode_stages=2, prefill_stages=2)
# Blackwell (sm_100, sm_103) as Hopper: 227 KiB; outputs lie in tensor memory while they are summed up.
_TUNING = {(8, 0): _SM_80, (9, 0): _SM_90, (10, 0): _SM_90, (10, 3): _SM_90}


def tuning_for(device: torch.device) -> KernelTuning:
    """For a CUDA device; for others as for an H100, so that what is planned there is what most replicas have."""
    return tuning_of(torch.cuda.get_device_capability(device)) if device.type == "cuda" else _SM_90


def tuning_of(capability: tuple[int, int]) -> KernelTuning:
    """An architecture that is not known gets what takes the least shared memory."""
    return _TUNING.get(capability, _SMALL)
