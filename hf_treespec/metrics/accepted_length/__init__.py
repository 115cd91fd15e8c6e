"""The `evaluate` module `accepted_length`."""
