"""Signed messages about the ends of batches: kept until they arrive, and sent to allowed addresses only.

Import from the modules: the API's processes need `receiver` only, and not what sends messages.
"""
