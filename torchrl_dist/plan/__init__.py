"""``torchrl-dist plan``: measure this machine, predict layouts, say whether to distribute."""
