"""Offline work: the service's batches, and bulk runs. Each item is answered once. Does not use HTTP or Ray."""
