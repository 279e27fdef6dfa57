"""Benchmarks of the engine in this process: throughput, parts of a step, strategies, the cost of single features."""
