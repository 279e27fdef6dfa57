"""The deployments that run in Ray Serve: the ingress, each model's replicas, and the batches process."""
