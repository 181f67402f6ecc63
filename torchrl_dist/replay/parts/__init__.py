"""Storage, samplers and writers that plug into TorchRL's replay buffer, for the processes of one
node."""
