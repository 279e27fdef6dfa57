"""Tensor parallelism: several processes, called ranks, run one model together (`replicas.tensor_parallel`)."""
