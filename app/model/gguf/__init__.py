"""Reads GGUF files and describes them in transformers' terms. Most of it works without torch."""
