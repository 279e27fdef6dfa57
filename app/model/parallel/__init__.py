"""Tensor parallelism: several processes, called ranks, compute one model together (`replicas.tensor_parallel`)."""
