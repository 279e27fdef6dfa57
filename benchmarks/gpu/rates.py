"""Record versions, the card, and the rates that all other stages are compared with: copies and matrix products."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from app.errors import described
from app.versions import versions
from benchmarks.gpu import without_msgspec
from benchmarks.gpu.bench import Bench
from benchmarks.gpu.card import told_by_driver

_ASKED = "name,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,power.limit"


def measure(bench: Bench) -> None:
    bench.put(**{f"{name}_version": version for name, version in versions().items() if version is not None})
    bench.put(cuda_version=torch.version.cuda, structs="dataclasses" if without_msgspec.is_missing() else "msgspec")
    if bench.device.type == "cuda":
        found = torch.cuda.get_device_properties(0)
        bench.put(
            card=found.name, multiprocessors=found.multi_processor_count, capability=f"{found.major}.{found.minor}"
        )
    bench.put(clocks_before=_clocks())
    bench.put(copy_gb_per_s=round(_measured_copy_rate(bench) / 1e9, 1))
    side = bench.sized(8192, 64)
    bench.put(bf16_tflop_per_s=_product_rate(bench, side, _bf16_product))
    for name, is_fast in (("fp8_tflop_per_s", False), ("fp8_fast_accum_tflop_per_s", True)):
        try:
            bench.put(**{name: _product_rate(bench, side, partial(_fp8_product, is_fast))})
        except (RuntimeError, TypeError, NotImplementedError) as error:
            bench.put(**{name: None, "fp8_refused": described(error)[:300]})
    bench.put(clocks_after=_clocks())


def copy_rate(bench: Bench) -> float:
    """Return the rate of copies in bytes a second, from the stage `rates` if it has run, else measured again."""
    known = bench.of_earlier("rates", "copy_gb_per_s")
    return _measured_copy_rate(bench) if known is None else known * 1e9


def _measured_copy_rate(bench: Bench) -> float:
    """Return the bytes read and written in a second, by a copy much larger than any cache."""
    source = torch.randn(bench.sized(2**31, 2**16), dtype=torch.bfloat16, device=bench.device)
    to = torch.empty_like(source)
    return 2 * source.nbytes / bench.seconds(lambda: to.copy_(source))


def _product_rate(
    bench: Bench, side: int, product_of: Callable[[torch.Tensor, torch.Tensor], Callable[[], object]]
) -> float:
    """Return the TFLOP/s of a product of two square random matrices."""
    left, right = (torch.randn(side, side, dtype=torch.bfloat16, device=bench.device) for _ in range(2))
    return round(2 * side**3 / bench.seconds(product_of(left, right)) / 1e12, 1)


def _bf16_product(left: torch.Tensor, right: torch.Tensor) -> Callable[[], object]:
    return lambda: left @ right


def _fp8_product(is_fast: bool, left: torch.Tensor, right: torch.Tensor) -> Callable[[], object]:
    """Return a product in FP8. is_fast: accumulates in fewer bits, which the engine does not do."""
    narrow, other = (each.to(torch.float8_e4m3fn) for each in (left, right))
    of_rows, of_columns = (torch.ones(shape, device=left.device) for shape in ((left.shape[0], 1), (1, right.shape[0])))
    return lambda: torch._scaled_mm(
        narrow, other.t(), scale_a=of_rows, scale_b=of_columns, out_dtype=torch.bfloat16, use_fast_accum=is_fast
    )


def _clocks() -> str | None:
    told = told_by_driver(_ASKED)
    return None if told is None else f"{_ASKED}: {told}"
