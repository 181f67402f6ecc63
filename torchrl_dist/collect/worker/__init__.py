"""What a worker of the collector does, whether it is a thread, a process or an RPC rank."""
