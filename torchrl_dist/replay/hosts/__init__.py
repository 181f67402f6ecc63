"""The parts of TorchRL's buffer over RPC: hosts that store rows, and clients that use them."""
