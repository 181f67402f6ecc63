"""Env processes of one node, which together write one rollout into shared memory."""
