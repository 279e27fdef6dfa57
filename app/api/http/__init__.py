"""The HTTP side of the API: routes, authentication, request bodies, event streams, errors and the OpenAPI document."""
