"""Generates Grafana boards, and recording rules and alerts for Prometheus. Does not import Ray.

`python -m deployments.dashboards` writes the files to this folder.
"""
