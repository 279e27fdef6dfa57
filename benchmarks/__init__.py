"""How fast the engine is, and others beside it: measured, compared, taken apart. Needs torch and transformers; no Ray.

Every page starts as `python -m benchmarks.NAME`; `--help` says what it takes. Not part of the installed package.
"""
