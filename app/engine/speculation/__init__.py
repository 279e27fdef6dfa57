"""Speculative decoding: proposes drafts of the next tokens. The draws of the model confirm or reject the drafts."""
