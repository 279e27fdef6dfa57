"""Grammars for structured output, compiled and matched token by token with llguidance. No torch here."""
