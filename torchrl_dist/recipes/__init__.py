"""Whole programs: a folder for each algorithm; what they share is in ``training``, ``parts``."""
