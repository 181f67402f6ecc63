"""Complete programs: one folder per algorithm, and ``training`` and ``parts``, which they share."""
