"""The learner's side: the collector, its workers, and the rules for when a batch is ready."""
