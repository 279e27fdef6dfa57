"""Joins our log with Serve's, so that one file has everything about a replica."""

from __future__ import annotations

import logging


def log_where_serve_does() -> None:
    """Send what `app` and `deployments` log in this process to Serve's handlers, at Serve's level.

    Without it Ray drops what is below a warning and sends the rest to the worker's stderr, far from Serve's files.
    """
    serves = logging.getLogger("ray.serve")
    for room in ("app", "deployments"):
        ours = logging.getLogger(room)
        # In throughput mode Serve holds a thousand lines back; ours are few and wanted at once.
        ours.handlers = [getattr(handler, "target", None) or handler for handler in serves.handlers]
        ours.setLevel(serves.getEffectiveLevel())
        ours.propagate = False
