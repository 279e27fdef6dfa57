"""Bulk runs: `python -m deployments.bulk` answers every row of files on a pool of engines. See `__main__.py`."""
