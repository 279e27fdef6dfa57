"""Reads GGUF files, and makes checkpoints for transformers from them. No torch here."""
