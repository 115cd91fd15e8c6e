"""The `evaluate` module `losslessness`."""
