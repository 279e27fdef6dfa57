"""What `make serve` runs: a Ray cluster of its own with one config file deployed on it."""
