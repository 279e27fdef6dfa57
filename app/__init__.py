"""Carousel without Ray: the batching engine, models, text, dispatch and the HTTP API. Must not import Ray."""
