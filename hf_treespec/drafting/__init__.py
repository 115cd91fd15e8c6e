"""Drafters: what proposes the trees that the target verifies."""

from .base import RootGenerator, TreeCandidateGenerator


__all__ = ["RootGenerator", "TreeCandidateGenerator"]
