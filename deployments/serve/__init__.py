"""What runs inside Ray Serve: the application, its ingress, its replicas, its batches."""
