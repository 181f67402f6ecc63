"""The learner's part: the collector, handles to its workers, and rules that decide when a batch is
ready."""
