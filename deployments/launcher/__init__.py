"""The launcher behind `make serve`, which starts a Ray cluster and deploys one config file on it."""
