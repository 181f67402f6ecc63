"""Make rollouts from a policy and environments, in one process."""
