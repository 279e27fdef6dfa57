"""Grafana boards, and rules and alerts for Prometheus, made from our metrics. No Ray.

`python -m deployments.dashboards` writes the files beside this one.
"""
