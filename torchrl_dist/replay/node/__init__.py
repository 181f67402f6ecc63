"""What the processes of one node share about a buffer, in a directory, under one lock."""
