"""The learner's side: the collector, its workers and when a batch is ready."""
