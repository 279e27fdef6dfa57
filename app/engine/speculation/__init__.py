"""Speculative decoding: drafts of the next tokens, and which of them the draws confirm."""
