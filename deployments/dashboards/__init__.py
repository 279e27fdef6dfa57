"""Grafana boards, and recording rules and alerts for Prometheus, made from our metrics. No Ray here.

`python -m deployments.dashboards` writes the files into this folder.
"""
