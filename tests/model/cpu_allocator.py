"""What torch's allocator for a CPU records of some work."""

from __future__ import annotations

import gc
from collections.abc import Callable

from torch.profiler import ProfilerActivity, profile


def peak_of_cpu(compute: Callable[[], object]) -> int:
    """Bytes that lived at once, of those allocated in `compute`; without mapped files.

    Garbage is collected first: the profiler would count what an earlier call left as freed in this one.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        compute()
    now = peak = 0
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak
