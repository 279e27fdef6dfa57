"""The HTTP side of the API: routes, authentication of requests, bodies, event streams, errors, the OpenAPI document."""
