"""The arithmetic of replay: places of rows, draws and weights. No processes."""
