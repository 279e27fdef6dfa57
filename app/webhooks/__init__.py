"""Sends signed messages when batches end. Stores them until they are delivered, and sends only to allowed addresses.

Import from the modules directly, because the API's processes need only `receiver`, not the modules that send.
"""
