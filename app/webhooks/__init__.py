"""Sends signed messages when batches end. Stores them until they arrive, and sends to allowed addresses only.

Import from the modules directly, because the API's processes need only `receiver`, not the modules that send.
"""
