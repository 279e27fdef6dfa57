"""The engine and the service measured, compared with others, put under faults. Not part of the installed package.

Commands are `python -m benchmarks.ROOM.NAME`; README.md lists them, `--help` prints the options. Those of the engine
need torch and transformers and no Ray; those of the service start it as `make serve` does.
"""
