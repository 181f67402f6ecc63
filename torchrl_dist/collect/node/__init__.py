"""The env processes of one node, which fill one rollout in shared memory."""
