"""Grammars for structured output. llguidance compiles them and matches them token by token. Does not import torch."""
