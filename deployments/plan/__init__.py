"""`python -m deployments.plan` plans memory, settings and replicas before a service is started."""
