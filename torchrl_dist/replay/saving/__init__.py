"""Checkpoints: save a buffer, write it to disk, and restore it."""
