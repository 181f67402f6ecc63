"""What the recipes do alike: options, the run's folder, the loop of a learner."""
