"""The arithmetic of replay: where rows lie, which are drawn, with which weights. No processes."""
