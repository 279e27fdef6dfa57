"""The launcher behind `carousel serve`. Starts a Ray cluster and deploys a config file on it."""
