"""Signed messages about the ends of batches, stored until they arrive and sent to allowed addresses only.

Import from the modules: the API's processes need only `receiver`, without the modules that send messages.
"""
