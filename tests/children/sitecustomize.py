"""Shorten the imports of all processes that tests start by a third. It is in their ``PYTHONPATH``.

Importing torch and TorchRL makes half a million objects and no garbage, for which the collector
looks after every 700. Here it looks less often.

If ``tests.warm`` has opened a door, a ``torchrun`` that is started by its name imports nothing. It
asks there for a fork, and waits for its end.
"""

import gc
import os
import sys

gc.set_threshold(10_000)

_door = os.environ.get("TORCHRL_DIST_TESTS_DOOR")
if _door and sys.orig_argv[1:2] and os.path.basename(sys.orig_argv[1]) == "torchrun":
    import pickle
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as _link:
        _link.connect(_door)
        _mounts = f"/proc/{os.getpid()}/ns/mnt"
        _program = (sys.orig_argv[2:], dict(os.environ), os.getcwd(), _mounts)
        socket.send_fds(_link, [pickle.dumps(_program)], [1, 2])
        _status = int(_link.recv(64) or 1)  # empty if the test has ended
    os._exit(_status if _status >= 0 else 128 - _status)
