"""Offline work: service batches and bulk runs, which answer each item once. No HTTP, no request handling, no Ray."""
