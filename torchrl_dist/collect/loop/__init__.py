"""From a policy and environments to a rollout, in one process."""
