"""`generate_batch`: a queue of requests through one model, rows refilled as they finish."""

from .api import BatchOutput, generate_batch, refuse_manager


__all__ = ["BatchOutput", "generate_batch", "refuse_manager"]
