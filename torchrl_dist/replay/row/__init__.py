"""What a row is: its columns, from TensorDicts to arrays and back."""
