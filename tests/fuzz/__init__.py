"""Random plans against a float64 oracle, and random calls of the raw ops; `python -m tests.fuzz --help`."""
