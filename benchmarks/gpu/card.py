"""Query the driver about the card, once or during a stage: clocks, causes of slow clocks, other processes.

Without a driver, the answers are empty.
"""

from __future__ import annotations

import os
from typing import Any

from benchmarks.harness.command import BenchmarkError, ran

# Names and bits of `nvidia-smi --help-query-gpu` and NVML. An idle card and the user's own limits are not listed.
_WATCHED = "clocks.sm,utilization.gpu,clocks_event_reasons.active"
_SLOWED_BY = {
    0x4: "power cap", 0x8: "hardware slowdown", 0x20: "temperature", 0x40: "temperature of the hardware",
    0x80: "power brake",
}  # fmt: skip
_IS_BUSY = 50  # percent of the time; the clocks of an idle card are not used


def told_by_driver(asked: str, form: str = "csv,noheader", *, of: str = "gpu") -> str | None:
    """Return the driver's answer about the first card that this process sees; None without a driver."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").partition(",")[0] or "0"
    try:
        return ran(["nvidia-smi", f"--id={first}", f"--query-{of}={asked}", f"--format={form}"], timeout_s=20)
    except BenchmarkError:
        return None


class WatchedCard:
    """Watches the card during a stage, from before the stage starts."""

    def __init__(self) -> None:
        self._others = told_by_driver("process_name,used_memory", of="compute-apps")
        self._samples: list[tuple[int, int, int]] = []  # MHz, percent, bits

    def look(self) -> None:
        """Record the present state of the card."""
        told = told_by_driver(_WATCHED, "csv,noheader,nounits")
        fields = (told or "").split(",")
        try:
            clock, busy, bits = (int(field, base) for field, base in zip(fields, (10, 10, 16), strict=True))
        except ValueError:  # no driver, or a driver without these values
            return
        self._samples.append((clock, busy, bits))

    def seen(self) -> dict[str, Any]:
        """Return the findings as cells of a table, without unknown values."""
        found: dict[str, Any] = {} if self._others is None else {"other_processes": self._others or "none"}
        clocks = [clock for clock, busy, _ in self._samples if busy >= _IS_BUSY]
        if clocks:
            found["sm_mhz"] = f"{min(clocks)} to {max(clocks)}"
        if self._samples:
            reasons = {word for *_, bits in self._samples for bit, word in _SLOWED_BY.items() if bits & bit}
            found["slowed_by"] = ", ".join(sorted(reasons)) or "nothing"
        return found
