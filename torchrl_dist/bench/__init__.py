"""Benchmarks: one question per module, ``main(argv)`` each, also run at toy size by the tests."""
