"""The collector's worker, which is the same in a thread, a process or an RPC rank."""
