"""Offline work: batches of a service and bulk runs, each item answered once. No HTTP, no request handling, no Ray."""
