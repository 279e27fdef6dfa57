"""Every figure of a GPU with one command: stages, each in a process of its own."""

import benchmarks.gpu.without_msgspec  # noqa: F401 - before all that imports `app`
