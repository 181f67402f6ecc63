"""What a row is: its columns, and how TensorDicts become arrays and arrays TensorDicts."""
