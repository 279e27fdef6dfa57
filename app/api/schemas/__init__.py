"""The fields of request bodies."""
