"""The deployments that run in Ray Serve: the ingress, the replicas of each model, and the batches process."""
