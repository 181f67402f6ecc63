"""What a row is: its leaves, from TensorDicts to plain tensors and back."""
