"""What Carousel does: batching engine, models, text, dispatch and the HTTP API. Nothing here knows Ray."""
