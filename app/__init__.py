"""Carousel without Ray: the batching engine, models, text, dispatch and the HTTP API. No module here imports Ray."""
