"""Plans made before anything is started: `python -m deployments.plan`."""
