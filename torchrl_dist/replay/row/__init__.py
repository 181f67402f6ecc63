"""The form of rows, and the conversion between TensorDicts and arrays."""
