"""Checkpoints: what is saved of a buffer, and how it is written to disk and read again."""
