"""``torchrl-dist plan``: measures this node, predicts layouts, and says whether to distribute."""
