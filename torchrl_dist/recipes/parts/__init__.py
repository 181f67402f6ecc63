"""Environments, networks and policies of the recipes; playing and plotting the results."""
