"""The launcher behind `make serve`: it starts a Ray cluster and deploys one config file on the cluster."""
