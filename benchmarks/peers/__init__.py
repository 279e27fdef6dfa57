"""Other engines on the same workload, in turn with ours."""
