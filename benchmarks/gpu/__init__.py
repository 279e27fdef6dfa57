"""Every figure of a GPU with one command. Each stage runs in its own process."""

import benchmarks.gpu.without_msgspec  # noqa: F401 - before all that imports `app`
