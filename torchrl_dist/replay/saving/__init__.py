"""Checkpoints: what is saved of a buffer, and how it gets to disk and back."""
