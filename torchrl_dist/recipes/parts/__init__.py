"""Environments, networks and policies of the recipes; playing and drawing what was learned."""
