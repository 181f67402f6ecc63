"""The state of a buffer that the processes of a node share, in a directory, under one lock."""
