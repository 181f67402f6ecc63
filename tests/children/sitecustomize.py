"""In ``PYTHONPATH`` of all processes that tests start: their imports take a third less.

Importing torch and TorchRL makes half a million objects and no garbage, for which the collector
looks after every 700. It looks as thoroughly here, but less often.
"""

import gc

gc.set_threshold(10_000)
