"""Several processes that compute one model together: `replicas.tensor_parallel`."""
