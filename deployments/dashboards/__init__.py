"""Generates Grafana boards, and recording rules and alerts for Prometheus. No Ray here.

`python -m deployments.dashboards` writes the files to this folder.
"""
