"""Replay buffers over RPC: hosts that store rows, and the storage and samplers that use them."""
