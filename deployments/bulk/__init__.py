"""Bulk runs: `python -m deployments.bulk` answers the rows of files on a pool of engines. See `__main__.py`."""
