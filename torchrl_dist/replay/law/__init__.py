"""The arithmetic of replay: slots of rows, draws and weights. It knows nothing of processes."""
