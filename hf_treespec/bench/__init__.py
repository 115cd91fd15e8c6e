"""Benchmarks: acceptance by replay, speed as interleaved pairs."""
