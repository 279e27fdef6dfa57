"""The deployments that run inside Ray Serve: the application, its ingress, its replicas and its batches."""
