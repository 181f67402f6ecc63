"""Env processes of one node, which write one rollout into shared memory together."""
