"""In ``PYTHONPATH``: this and all processes that it starts run on a processor that nobody knows."""

import platform

platform.machine = lambda: "unknown"
