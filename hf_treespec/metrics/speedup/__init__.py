"""The `evaluate` module `speedup`."""
