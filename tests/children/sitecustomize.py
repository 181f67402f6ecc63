"""Shorten the imports of all processes that tests start by a third. It is in their ``PYTHONPATH``.

Importing torch and TorchRL makes half a million objects and no garbage, for which the collector
looks after every 700. Here it looks less often.

If ``tests.warm`` has opened a door, some programs import nothing: ``torchrun`` and ``torchrl-dist``
that are started by their names, and kernels of notebooks. They ask there for a fork, forward
signals to it, and wait for its end.
"""

import gc
import os
import sys

gc.set_threshold(10_000)

_door = os.environ.get("TORCHRL_DIST_TESTS_DOOR")
_words = sys.orig_argv[1:]
_modules = {"torchrun": "torch.distributed.run", "torchrl-dist": "torchrl_dist"}
_module = _modules.get(os.path.basename(_words[0])) if _words else None
if _door and (_module or _words[:2] == ["-m", "ipykernel_launcher"]):
    import pickle
    import signal
    import socket

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as _link:
        _link.connect(_door)
        _mounts = f"/proc/{os.getpid()}/ns/mnt"
        _arguments = ["-m", _module, *_words[1:]] if _module else _words
        _program = (_arguments, dict(os.environ), os.getcwd(), _mounts)
        socket.send_fds(_link, [pickle.dumps(_program)], [1, 2])
        for _number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(_number, lambda number, _: _link.send(b"%d" % number))
        _status = int(_link.recv(64) or 1)  # empty if the test has ended
    os._exit(_status if _status >= 0 else 128 - _status)
