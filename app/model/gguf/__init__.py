"""GGUF files: what is in them, and checkpoints as transformers has them made of it. No torch here."""
