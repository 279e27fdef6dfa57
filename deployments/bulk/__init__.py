"""`python -m deployments.bulk`: the rows of files through a pool of engines. See `__main__.py`."""
