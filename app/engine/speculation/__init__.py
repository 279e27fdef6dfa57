"""Speculative decoding: proposes drafts of the next tokens, which the model's draws then accept or reject."""
