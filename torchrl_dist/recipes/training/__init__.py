"""The parts that all recipes share: options, the run's folder, and the learner's loop."""
