"""The `evaluate` module `answer_match`."""
