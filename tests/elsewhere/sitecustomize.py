"""Let this process and all that it starts run on an unknown processor. It is in ``PYTHONPATH``."""

import platform

platform.machine = lambda: "unknown"
