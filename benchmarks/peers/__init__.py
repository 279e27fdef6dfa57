"""Other engines on one workload, in turn with ours."""
