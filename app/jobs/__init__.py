"""Offline work: service batches and bulk runs. Each item is answered once. No HTTP, no request handling, no Ray."""
