"""Measurements, comparisons and fault tests of the engine and the service. Not part of the installed package.

Run a benchmark with `python -m benchmarks.ROOM.NAME`. README.md lists the benchmarks, and `--help` prints the options.
The benchmarks of the engine need torch and transformers and no Ray; the others start the service as `make serve` does.
"""
