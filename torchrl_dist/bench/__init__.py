"""Benchmarks: one question per module, also run at toy size by the tests."""
