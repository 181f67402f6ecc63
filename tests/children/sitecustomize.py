"""In ``PYTHONPATH`` of all processes that tests start: their imports take a third less.

Importing torch and TorchRL makes half a million objects and no garbage, for which the collector
looks after every 700. It looks as thoroughly here, but less often.

Where ``tests.warm`` has opened a door, a ``torchrun`` that somebody starts by its name has no
imports at all: it has itself forked there, and waits for the end.
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
        _status = int(_link.recv(64) or 1)  # nothing: the test has ended
    os._exit(_status if _status >= 0 else 128 - _status)
