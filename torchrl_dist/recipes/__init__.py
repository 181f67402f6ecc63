"""Complete programs: one folder per algorithm, and the shared ``training`` and ``parts``."""
