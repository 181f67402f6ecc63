"""Benchmarks. Each module answers one question. The tests run them at toy size."""
