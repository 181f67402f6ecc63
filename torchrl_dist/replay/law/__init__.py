"""The arithmetic of replay: slots of rows, draws and weights. It does not depend on processes."""
