"""What each guard of the package is for: revert it, and a test must fail.

    python -m tests.guards                   # all, one after another; half an hour
    python -m tests.guards tree-marks ...    # these

A guard is a line or two without which a promise of ``replay``, ``collect`` or ``learn`` does not
hold. Each entry of ``GUARDS`` names the promise, the text that holds it, a text in its place that
does not, and a test that must fail then. The script copies package and tests, first runs the tests
on the copy as it is, then puts in one revert at a time. It prints a table, names the guards that
no test misses, and exits with their number.

``tests/test_guards.py`` checks that every text is found once, so that a guard whose lines were
rewritten is adapted here.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import runpy
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = "torchrl_dist"
_LIMIT_S = 120
_PRELOAD = ("torch", "torch.distributed.rpc", "torchrl.objectives", "torchrl.collectors", "pytest")
_KERNEL = "TORCHRL_DIST_KERNEL"


@dataclass(frozen=True)
class Guard:
    """One line that holds a promise.

    Attributes:
        name: for the command line.
        promise: what does not hold without it.
        folder: of the package, where the text is looked for in all files.
        reverts: texts, and what takes their places. Each is found once.
        test: fails without the guard.
        kernel: the implementation that has it, ``c`` or ``numpy``; empty: both need it.
    """

    name: str
    promise: str
    folder: str
    reverts: dict[str, str]
    test: str
    kernel: str = ""


def _replay(name: str, promise: str, old: str, new: str, test: str, kernel: str = "") -> Guard:
    return Guard(name, promise, "replay", {old: new}, f"tests/replay/{test}", kernel)


def _collect(name: str, promise: str, old: str, new: str, test: str) -> Guard:
    return Guard(name, promise, "collect", {old: new}, f"tests/collect/{test}")


def _learn(name: str, promise: str, old: str, new: str, test: str) -> Guard:
    return Guard(name, promise, "learn", {old: new}, f"tests/learn/{test}")


_ONE_WRITER = "a slot has one writer"
_WHOLE = "a row that is read is one whole row"
_MEETS = "a priority meets its row, or none"
_PUBLISHED = "only published rows count and are drawn"
_KILLED = "a killed process leaves no harm"
_SUMS = "sums equal leaves"
_LAW = "the law and the weights of one buffer"
_PASS = "at most once per pass, by all processes"
_ORDER = "by RPC: in order, each once"
_RANGE = "samples per insert stay in their range"
_CHECKPOINT = "the earlier checkpoint, or the new one"

_REPLAY = (
    _replay(
        "claims-numpy",
        _ONE_WRITER,
        "                live.append((first, count))",
        "                pass",
        "test_int64.py::test_claims_beyond_the_number_are_kept_apart_and_taken_over",
        "numpy",
    ),
    _replay(
        "claims-c",
        _ONE_WRITER,
        "if (ahead < count || capacity - ahead < rows) return 1;",
        "if (0) return 1;",
        "test_int64.py::test_claims_beyond_the_number_are_kept_apart_and_taken_over",
        "c",
    ),
    _replay(
        "claims-in-place",
        _ONE_WRITER,
        "if row is None or self._live_claims(ranges):",
        "if row is None:",
        "test_buffer.py::test_a_restore_waits_for_who_writes_its_slots",
    ),
    _replay(
        "ticket-order",
        _ONE_WRITER,
        "words[Word.CURSOR] = ticket + count\n",
        "words[Word.CURSOR] = words[Word.CURSOR] + count - 1\n",
        "test_buffer.py::test_the_ring_wraps_like_torchrls",
        "numpy",
    ),
    _replay(
        "dropped-writes",
        _ONE_WRITER,
        "if claim[CLAIM_STATE] != CLAIM_DISCARDED:",
        "if True:",
        "test_buffer.py::test_rows_that_were_being_written_when_the_buffer_was_emptied_are_dropped",
        "numpy",
    ),
    _replay(
        "versions-of-draws",
        _WHOLE,
        "if now.tobytes() == versions.tobytes():",
        "if True:",
        "test_torn.py::test_no_row_is_torn_while_writers_lap_readers_and_each_other",
    ),
    _replay(
        "versions-of-slots",
        _WHOLE,
        " & (directory.versions[slots] == versions)\n",
        "\n",
        "test_torn.py::test_no_row_is_torn_while_writers_lap_readers_and_each_other",
    ),
    _replay(
        "versions-of-slices",
        _WHOLE,
        "changed = int(np.count_nonzero(directory.versions[slots] != versions))",
        "changed = 0",
        "test_slices.py::test_a_sampler_that_keeps_losing_rows_ends_under_the_lock",
    ),
    _replay(
        "versions-of-passes",
        _WHOLE,
        "whole = directory.versions[slots] == versions",
        "whole = np.ones(slots.size, bool)",
        "test_passes.py::test_rows_that_change_while_they_are_copied_are_not_returned",
    ),
    _replay(
        "versions-of-checkpoints",
        _WHOLE,
        "if not np.any((directory.versions[start:stop] != found.versions) & found.keep):",
        "if True:",
        "test_checkpoint.py::test_rows_that_change_all_the_time_are_saved_whole",
    ),
    _replay(
        "generations-numpy",
        _MEETS,
        "fresh &= versions >> 1 == generation",
        "pass",
        "test_buffer.py::test_late_priority_for_a_recycled_slot_is_dropped",
        "numpy",
    ),
    _replay(
        "generations-c",
        _MEETS,
        "if (generations) fresh = fresh && version >> 1 == generations[i];",
        "",
        "test_buffer.py::test_late_priority_for_a_recycled_slot_is_dropped",
        "c",
    ),
    _replay(
        "generations-of-hosts",
        _MEETS,
        "stamps = None if generation is None else generation.numpy().copy()",
        "stamps = None",
        "test_hosted.py::test_a_late_priority_for_a_recycled_slot_is_dropped",
    ),
    _replay(
        "generations-of-recent-rows",
        _MEETS,
        "self._recent.remember(drawn.index, drawn.generation, written=False)",
        "pass",
        "test_buffer.py::test_late_priority_for_a_recycled_slot_is_dropped",
    ),
    _replay(
        "leaf-of-reserved-numpy",
        _PUBLISHED,
        "versions |= 1\n    directory.tree.set_range(start, stop, 0.0)",
        "versions |= 1",
        "test_law.py::test_rows_that_are_being_written_are_not_drawn_and_the_others_by_the_law",
        "numpy",
    ),
    _replay(
        "leaf-of-reserved-c",
        _PUBLISHED,
        "marks[slot >> SHIFT] = 1;\n        leaves[slot] = 0.0;",
        "",
        "test_law.py::test_rows_that_are_being_written_are_not_drawn_and_the_others_by_the_law",
        "c",
    ),
    _replay(
        "uniform-draws",
        _PUBLISHED,
        "todo = todo[(now & 1 == 1) | (now == 0)]",
        "todo = todo[:0]",
        "test_law.py::test_rows_that_are_being_written_are_not_drawn_and_the_others_by_the_law",
    ),
    _replay(
        "tickets-go-on",
        _PUBLISHED,
        "words[Word.CURSOR] += lap  # the next row goes to slot 0",
        "words[Word.CURSOR] = 0\n    directory.versions[:] = 0",
        "test_buffer.py::test_empty_drops_rows_but_never_lets_old_handles_look_fresh",
    ),
    _replay(
        "length-numpy",
        _PUBLISHED,
        "directory.words[Word.LENGTH] -= published",
        "pass",
        "test_processes.py::test_a_stopped_writer_keeps_its_slots_and_harms_nobody",
        "numpy",
    ),
    _replay(
        "in-place-mark",
        _PUBLISHED,
        "directory.words[Word.IN_PLACE] = start + count",
        "pass",
        "test_edges.py::test_a_row_in_place_far_ahead_leaves_a_gap_that_is_told_of_at_once",
    ),
    _replay(
        "in-place-mark-ends",
        _PUBLISHED,
        "words[Word.IN_PLACE] = 0",
        "pass",
        "test_edges.py::test_a_row_in_place_far_ahead_leaves_a_gap_that_is_told_of_at_once",
    ),
    _replay(
        "repair",
        _KILLED,
        "if self.words[Word.DIRTY]:",
        "if False:",
        "test_processes.py::test_an_exception_inside_a_critical_section_is_repaired_by_the_next",
    ),
    _replay(
        "dirty-c",
        _KILLED,
        "    words[DIRTY] = 1;\n    IN_ORDER;\n    words[CURSOR] = ticket + count;",
        "    words[CURSOR] = ticket + count;",
        "test_stores.py::test_killed_between_any_two_stores[c-extend]",
        "c",
    ),
    _replay(
        "publication-is-completed",
        _KILLED,
        "        if state == CLAIM_PUBLISHING:\n",
        "        if False:\n",
        "test_stores.py::test_killed_between_any_two_stores[numpy-extend]",
        "numpy",
    ),
    _replay(
        "claims-of-the-dead",
        _KILLED,
        "            else:\n                claims[row, CLAIM_COUNT] = 0\n",
        "            else:\n                live.append((first, count))\n",
        "test_int64.py::test_claims_beyond_the_number_are_kept_apart_and_taken_over",
        "numpy",
    ),
    _replay(
        "lock-ends-with-its-holder",
        _KILLED,
        "os.register_at_fork(after_in_child=_give_up_copies)",
        "",
        "test_kills.py::test_a_child_of_a_killed_holder_does_not_keep_the_lock",
    ),
    _replay(
        "interrupted-writes",
        _KILLED,
        "if held.thread == thread and not is_on_stack(held.frame, top)",
        "if False",
        "test_interrupts.py::test_ctrl_c_at_any_point_loses_and_holds_nothing",
    ),
    _replay(
        "marks-numpy",
        _SUMS,
        "self._marks[slots >> _SHIFT] = 1\n",
        "pass\n",
        "test_tree.py::test_sum_and_minimum_equal_the_leaves_after_any_writes",
    ),
    _replay(
        "marks-c",
        _SUMS,
        "            marks[slots[i] >> SHIFT] = 1;\n",
        "",
        "test_buffer.py::test_law_and_weights_are_those_of_the_paper",
        "c",
    ),
    _replay(
        "marks-are-first",
        _SUMS,
        "        self._marks[slots >> _SHIFT] = 1\n        self.leaves[slots] = values\n",
        "        self.leaves[slots] = values\n        self._marks[slots >> _SHIFT] = 1\n",
        "test_tree.py::test_a_process_killed_between_mark_and_leaf_leaves_a_tree_that_repairs_itself",
    ),
    _replay(
        "draw-c",
        _LAW,
        "leaves[i] = mass - (sum - child[k]);",
        "leaves[i] = mass - sum / 2;",
        "test_tree.py::test_both_kernels_select_the_same_slots",
    ),
    _replay(
        "draw-numpy",
        _LAW,
        "mass -= np.where(child > 0, running[row, child - 1], 0.0)",
        "mass -= running[row, child] / 2",
        "test_tree.py::test_both_kernels_select_the_same_slots",
    ),
    _replay(
        "weights",
        _LAW,
        "weight = ((drawn.leaf / drawn.minimum) ** -float(self._beta)).astype(np.float32)",
        "weight = ((drawn.leaf / drawn.leaf.min()) ** -float(self._beta)).astype(np.float32)",
        "test_buffer.py::test_law_and_weights_are_those_of_the_paper",
    ),
    _replay(
        "correction-of-shards",
        _LAW,
        "return correct_shards(self.shards, self.masses, new_masses, uniforms)",
        "return self.shards",
        "test_shard_law.py::test_a_batch_has_the_law_of_the_masses_in_the_replies",
    ),
    _replay(
        "largest-priority-of-shards",
        _LAW,
        "return float(known.max()) if known.size else",
        "return float(known.min()) if known.size else",
        "test_shard_law.py::test_the_largest_priority_travels_past_shards_that_have_none",
    ),
    _replay(
        "pass-counter",
        _PASS,
        "        self._head[_PASSED] = passed\n",
        "        self._head[_PASSED] = max(passed - 1, self._head[_PASSED] + 1)\n",
        "test_passes.py::test_a_pass_visits_each_row_once_and_the_next_in_another_order",
    ),
    Guard(
        "pass-leaves-out-new-rows",
        _PASS,
        "replay",
        {
            "            there = self._directory.versions[slots] == versions\n": (
                "            there = np.ones(slots.size, bool)\n"
            ),
            "whole = directory.versions[slots] == versions": "whole = np.ones(slots.size, bool)",
        },
        "tests/replay/test_passes.py::"
        "test_overwritten_rows_are_left_out_and_new_ones_wait_for_the_next_pass",
    ),
    Guard(
        "one-call-under-way",
        _ORDER,
        "replay",
        {
            "if self._under_way is not None or not self._queue or self._lost is not None:": (
                "if not self._queue or self._lost is not None:"
            ),
            "if self._under_way is None and (urgent or first):": "if urgent or first:",
        },
        "tests/replay/test_link.py::"
        "test_what_was_under_way_or_queued_when_a_client_closed_is_applied_once",
    ),
    _replay(
        "no-call-is-repeated",
        _ORDER,
        "            future = self._serve(request)\n",
        "            self._serve(request)\n            future = self._serve(request)\n",
        "test_hosted.py::test_what_was_sent_to_a_late_owner_is_applied_once",
    ),
    _replay(
        "operations-before-the-draw",
        _ORDER,
        "queued.append(item)\n",
        "queued.insert(0, item)\n",
        "test_hosted.py::test_nothing_but_a_sample_waits_for_a_slow_owner",
    ),
    _replay(
        "limiter-of-samples",
        _RANGE,
        "short = self.range[0] + batch_size - self.difference(counts)",
        "short = self.range[0] - self.difference(counts)",
        "test_limiter.py::test_the_difference_stays_in_its_range",
    ),
    _replay(
        "limiter-of-writes",
        _RANGE,
        "return max(0, math.ceil(self.difference(counts) - self.range[1]))",
        "return 0",
        "test_limiter.py::test_the_difference_stays_in_its_range",
    ),
    _replay(
        "gate-counts-rows-under-way",
        _RANGE,
        "missing = self.limiter.missing_samples(self.counts(cursor.rows_under_way()))",
        "missing = self.limiter.missing_samples(self.counts())",
        "test_gate.py::test_processes_keep_to_the_range",
    ),
    _replay(
        "gate-forgets-the-dead",
        _RANGE,
        "            if not self._directory.is_alive(int(users[row, USER_MEMBER])):",
        "            if False:",
        "test_gate.py::test_what_a_killed_process_did_not_return_counts_no_more",
    ),
    _replay(
        "gate-of-hosts",
        _RANGE,
        "self._admitted += count",
        "pass",
        "test_limiter_hosts.py::test_at_no_instant_a_sample_counts_twice",
    ),
    _replay(
        "rows-are-used-up",
        _RANGE,
        "        tree.set(full, 0.0)\n",
        "",
        "test_gate.py::test_no_row_is_sampled_more_often_than_allowed",
    ),
    _replay(
        "earlier-one-stays",
        _CHECKPOINT,
        '        manifest["checksum"] = _sum_of(manifest)\n',
        '        manifest["checksum"] = _sum_of(manifest)\n'
        "        if self._earlier is not None:\n"
        "            _remove_folder(self._path / self._earlier)\n",
        "test_checkpoint.py::test_killed_anywhere_the_earlier_or_the_new_checkpoint_is_whole",
    ),
    _replay(
        "files-before-the-manifest",
        _CHECKPOINT,
        "        for fd in (self._runs_file, self._priority):\n            os.fsync(fd)\n",
        "",
        "test_checkpoint.py::test_all_is_on_the_disk_before_the_new_checkpoint_is_valid",
    ),
    _replay(
        "order-of-the-ring",
        _CHECKPOINT,
        "        passed = max(0, directory.words[Word.CURSOR] - since - position)",
        "        passed = 0",
        "test_checkpoint.py::test_a_restore_lets_newer_rows_stay",
    ),
    _replay(
        "rows-of-before-the-checkpoint",
        _CHECKPOINT,
        "keep[: max(0, directory.words[Word.CURSOR] - cursor - position)] = False",
        "pass",
        "test_checkpoint.py::test_rows_that_were_overwritten_are_missing_and_counted",
    ),
    _replay(
        "model",
        "any of these, in any order of calls",
        "words[Word.CURSOR] += lap  # the next row goes to slot 0",
        "pass",
        "test_fuzz.py::test_two_buffers_of_one_process_do_as_the_model",
    ),
)

_COLLECT = (
    _collect(
        "frames-are-exact",
        "a job collects exactly its frames",
        "        granted = min(envs, remaining)\n",
        "        granted = envs\n",
        "test_budget.py::test_shares_add_up_to_the_budget_exactly",
    ),
    _collect(
        "frames-of-the-dead",
        "the others collect what a lost worker was to collect",
        "        if self.remaining is not None:\n"
        "            self.remaining += sum(each.frames for each in freed)\n",
        "",
        "test_budget.py::test_whoever_asks_first_and_whoever_dies_the_total_is_exact",
    ),
    _collect(
        "wait-for-all",
        "a batch holds a rollout of every worker",
        "return tuple(sorted(arrived)) if set(arrived) >= set(expected) else ()\n\n\n"
        "@dataclass(frozen=True)\nclass FirstReady",
        "return tuple(sorted(arrived))\n\n\n@dataclass(frozen=True)\nclass FirstReady",
        "test_readiness.py::test_nobody_is_taken_until_everybody_is_there",
    ),
    _collect(
        "order-of-answers",
        "rollouts of a worker are delivered in the order of their requests",
        "        while worker.settled in worker.overtook:\n",
        "        worker.settled = max(worker.overtook, default=worker.settled)\n"
        "        while worker.settled in worker.overtook:\n",
        "test_crew.py::"
        "test_answers_that_overtake_each_other_are_delivered_in_the_order_of_their_requests",
    ),
    _collect(
        "gap-after-a-loss",
        "no trajectory spans rows that were dropped",
        "        worker.given_up -= 1\n        worker.has_gap = True\n",
        "        worker.given_up -= 1\n",
        "test_crew.py::test_a_worker_that_comes_back_begins_new_episodes",
    ),
    _collect(
        "hang-is-noticed",
        "a worker that hangs is lost after worker_timeout_s",
        "if worker.in_flight and awake() - worker.busy_since > limit_s:",
        "if False:",
        "test_access.py::test_when_everybody_hangs_collection_ends",
    ),
    _collect(
        "weights-do-not-go-back",
        "weights older than those in use are ignored",
        "if packed.version >= self._rollout.policy_version:",
        "if True:",
        "test_collector.py::test_weights_that_are_older_than_those_in_use_are_ignored",
    ),
    _collect(
        "newest-weights",
        "without lag every row comes from the newest weights",
        "                weights=weights,\n                request=request.number,",
        "                weights=None,\n                request=request.number,",
        "test_collector.py::test_without_lag_every_row_comes_from_the_newest_weights",
    ),
    _collect(
        "cut-is-no-end",
        "a rollout that is cut short is truncated, not terminated, and masked",
        "        truncated[:, -1] |= ~done[:, -1]\n",
        "",
        "test_joining.py::test_a_cut_rollout_is_padded_masked_and_truncated",
    ),
    _collect(
        "trajectory-after-a-cut",
        "after a cut the episode goes on as another trajectory",
        "                self._episodes.split()\n",
        "",
        "test_joining.py::"
        "test_after_a_cut_the_episode_goes_on_as_another_trajectory_with_one_return",
    ),
    _collect(
        "trajectory-ids",
        "no two workers give out the same trajectory id",
        "return self.base + taken * self.stride + self.offset",
        "return self.base + taken",
        "test_node.py::test_trajectories_have_ids_of_their_own",
    ),
    _collect(
        "late-rollout-is-kept",
        "a deadline loses no rows",
        "            self._part = rows\n",
        "",
        "test_threads.py::test_a_deadline_between_two_steps_loses_nothing",
    ),
    _collect(
        "requests-in-order",
        "requests that come together run in their order",
        "with self._turns.wait_for(request), self._lock:\n"
        "            if self._closed:\n                return None, RolloutStats(index, 0)\n"
        "            part, ",
        "with self._lock:\n"
        "            if self._closed:\n                return None, RolloutStats(index, 0)\n"
        "            part, ",
        "test_collector_cluster.py::test_requests_that_come_together_run_in_their_order",
    ),
    _collect(
        "seeds-by-env",
        "an env's seed is that of its number in the job",
        "first = self.num_envs * self.config.worker_index\n            self._rollout.seed(",
        "first = 0\n            self._rollout.seed(",
        "test_collector_cluster.py::test_the_same_envs_give_the_same_data_however_they_are_split",
    ),
)

_LEARN = (
    _learn(
        "one-start",
        "all ranks start from rank 0's tensors",
        "            _take_from_first(loss_module, ranks)\n",
        "",
        "test_gradients.py::test_gradients_are_those_of_the_whole_batch",
    ),
    _learn(
        "mean-over-ranks",
        "gradients are those of one process with all rows",
        "        buffer[count:].div_(self._ranks.size)\n",
        "",
        "test_gradients.py::test_gradients_are_those_of_the_whole_batch",
    ),
    _learn(
        "divisors",
        "each mean counts by what it divided by on each rank",
        "self.factor = ranks * self.divisor / total if total else 0.0",
        "self.factor = 1.0",
        "test_gradients.py::test_a_mask_weighs_as_many_rows_as_it_leaves",
    ),
    _learn(
        "known-classes",
        "a loss whose rows may not be independent is refused",
        "    if rule is None:\n        return (",
        "    if rule is None:\n        return None\n        return (",
        "test_classes.py::test_every_other_class_is_refused",
    ),
    _learn(
        "linear-parts",
        "a loss that is no sum of means is refused",
        '                return f"it is no sum of means over rows',
        '                continue\n                return f"it is no sum of means over rows',
        "test_classes.py::test_every_class_that_is_known_is_exact",
    ),
    _learn(
        "estimators",
        "statistics of a rank's own rows are refused",
        "        if getattr(estimator, name, False):",
        "        if False:",
        "test_gradients.py::test_an_estimator_that_averages_over_a_batch_is_refused",
    ),
    _learn(
        "advantages-of-all",
        "advantages are normalized by statistics of all ranks",
        "torch.tensor(add_up(what, own.flatten().tolist()), dtype=torch.float64)",
        "own.flatten().clone()",
        "test_classes.py::test_every_class_that_is_known_is_exact",
    ),
    _learn(
        "reached-elsewhere",
        "ranks may reach different parameters",
        "somewhere = reached if all(reached) else (buffer[:count] > 0).tolist()",
        "somewhere = reached",
        "test_gradients.py::test_ranks_may_reach_different_parameters",
    ),
    _learn(
        "earlier-passes",
        "what an earlier pass has averaged stays in the sum",
        "                view.copy_(parameter.grad)\n",
        "                view.copy_(parameter.grad)\n"
        "                view.mul_(reached[list(self._parameters).index(name)])\n",
        "test_gradients.py::test_gradients_of_an_earlier_pass_stay_in_the_sum",
    ),
    _learn(
        "one-owner",
        "a parameter is averaged by one loss at a time",
        "return _owners.get(parameter, lambda: None)() not in (None, self)",
        "return False",
        "test_gradients.py::test_a_network_is_averaged_by_one_loss_at_a_time",
    ),
    _learn(
        "no-step-in-backward",
        "an optimizer's step before the average is noticed",
        "if self._parameters[name]._version != before.get(name):",
        "if False:",
        "test_gradients.py::test_what_would_train_ranks_apart_is_noticed_and_named",
    ),
    _learn(
        "likeness",
        "ranks whose losses were built differently are told",
        "            _compare(loss_module, ranks)\n            _take_from_first",
        "            _take_from_first",
        "test_loss.py::test_ranks_whose_losses_were_built_differently_are_told",
    ),
    _learn(
        "drift",
        "tensors that drift apart are named",
        "        if differing:\n            shown =",
        "        if False:\n            shown =",
        "test_gradients.py::test_the_checksum_names_what_drifts",
    ),
    _learn(
        "failures-are-reported",
        "waiting ranks get the exception of the one that failed",
        "            self.ranks.report(error)\n",
        "            pass\n",
        "test_failures.py::"
        "test_an_exception_reaches_the_waiting_ranks_with_traceback_rank_and_host",
    ),
)

GUARDS = (*_REPLAY, *_COLLECT, *_LEARN)


class RottenError(AssertionError):
    """The text of a guard is not in the package once."""


def reverted(guard: Guard, package: Path) -> dict[Path, str]:
    """The files that change, with their text after the revert.

    Args:
        package: the folder ``torchrl_dist``.

    Raises:
        RottenError: a text is missing, or is there several times.
    """
    folder = package / guard.folder
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".py", ".c"))
    texts = {path: path.read_text() for path in files}
    changed = {}
    for old, new in guard.reverts.items():
        found = [path for path in files for _ in range(texts[path].count(old))]
        if len(found) != 1:
            where = [str(path.relative_to(package)) for path in found]
            raise RottenError(
                f"{guard.name}: expected this text once in {guard.folder}/, found it in {where}; "
                f"adapt the guard to the lines that hold its promise now:\n{old}"
            )
        changed[found[0]] = texts[found[0]] = texts[found[0]].replace(old, new)
    return changed


@contextmanager
def _changed(changes: dict[Path, str]) -> Iterator[None]:
    before = {path: path.read_text() for path in changes}
    kernels = [path for path in changes if path.suffix == ".c"]
    try:
        for path, text in changes.items():
            _write(path, text)
        for path in kernels:
            _build(path)
        yield
    finally:
        for path, text in before.items():
            _write(path, text)
        for path in kernels:
            _build(path)


def _write(path: Path, text: str) -> None:
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*"):
        compiled.unlink()  # it might be of a text as long, of the same second


def _build(source: Path) -> None:
    compiler = (sysconfig.get_config_var("CC") or "cc").split()
    include = f"-I{sysconfig.get_path('include')}"
    target = source.with_suffix(".abi3.so")
    target.unlink(missing_ok=True)  # a process that has it open keeps the old one
    command = [*compiler, "-O3", "-shared", "-fPIC", include, str(source), "-o", str(target)]
    subprocess.run(command, check=True)


def _copy(to: Path) -> None:
    rubbish = shutil.ignore_patterns("__pycache__", ".hypothesis")
    for name in (PACKAGE, "tests"):
        shutil.copytree(ROOT / name, to / name, ignore=rubbish)
    for name in ("pyproject.toml", "README.md", "tutorials", ".github"):
        (to / name).symlink_to(ROOT / name)


@dataclass(frozen=True)
class Outcome:
    failed: tuple[str, ...]
    seconds: float
    output: str


def _run(tests: Sequence[str], folder: Path, kernel: str = "") -> Outcome:
    """What fails in the copy. Blocks; a test that does not end has failed."""
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as output:
        pid = os.fork()
        if not pid:
            status = 3
            try:
                _be_pytest(tests, folder, kernel, output.fileno())
            except SystemExit as end:
                status = int(end.code or 0)
            finally:
                for stream in (sys.stdout, sys.stderr):
                    stream.flush()
                os._exit(status)
        status = None
        while status is None and time.monotonic() - begun < _LIMIT_S + 60:
            time.sleep(0.05)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) if _has_ended(pid) else None
        if status is None:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        output.seek(0)
        said = output.read()
    failed = re.findall(r"^(?:FAILED|ERROR) \S*?(\w+\.py::[^\s\[]+)", said, re.MULTILINE)
    if not failed and status != 0:
        if status is not None and "Timeout" not in said:
            raise RuntimeError(f"pytest ended with {status}:\n{said[-3000:]}")
        failed = ["(no end within the time)"]
    return Outcome(tuple(dict.fromkeys(failed)), time.monotonic() - begun, said)


def _has_ended(pid: int) -> bool:
    return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _be_pytest(tests: Sequence[str], folder: Path, kernel: str, output: int) -> None:
    """As ``python -m pytest`` in the copy, but for the imports, which the parent has made."""
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    os.chdir(folder)
    os.environ["PYTHONPATH"] = str(folder)
    if kernel:
        os.environ[_KERNEL] = kernel
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", PACKAGE)]:
        del sys.modules[name]
    others = [entry for entry in sys.path if entry and Path(entry).resolve() != ROOT]
    sys.path[:] = [str(folder), *others]
    options = f"-n 0 -q -rfE -p no:cacheprovider -x --timeout {_LIMIT_S}".split()
    sys.argv[:] = ["pytest", *options, *tests]
    runpy._run_module_as_main("pytest")  # type: ignore[attr-defined]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.guards", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("names", nargs="*", metavar="NAME", help="guards; default: all")
    parser.add_argument("--show", action="store_true", help="print what pytest says")
    parser.add_argument("--no-baseline", action="store_true", help="trust that the tests pass")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {guard.name for guard in GUARDS}
    if unknown:
        parser.error(f"no guard is called {', '.join(sorted(unknown))}")
    guards = [guard for guard in GUARDS if guard.name in arguments.names or not arguments.names]
    with tempfile.TemporaryDirectory(prefix="torchrl_dist-guards-") as name:
        return _try_all(guards, Path(name), arguments.show, not arguments.no_baseline)


def _try_all(guards: Sequence[Guard], folder: Path, show: bool, baseline: bool) -> int:
    _copy(folder)
    for module in _PRELOAD:
        importlib.import_module(module)
    for kernel in sorted({guard.kernel for guard in guards}) if baseline else ():
        tests = dict.fromkeys(guard.test for guard in guards if guard.kernel == kernel)
        outcome = _run(list(tests), folder, kernel)
        if outcome.failed:
            print(outcome.output)
            sys.exit(f"fails before anything was reverted: {', '.join(outcome.failed)}")
    print("guard | promise | reverted | test that fails | seconds", flush=True)
    survivors = []
    for guard in guards:
        with _changed(reverted(guard, folder / PACKAGE)):
            outcome = _run([guard.test], folder, guard.kernel)
        if show:
            print(outcome.output)
        if not outcome.failed:
            survivors.append(guard.name)
        what = " ".join(next(iter(guard.reverts)).split())
        fails = ", ".join(outcome.failed) or f"NONE of {guard.test}"
        line = f"{guard.name} | {guard.promise} | `{what}` | {fails} | {outcome.seconds:.1f}"
        print(line, flush=True)
    print(f"{len(guards)} guards, {len(survivors)} of them no test misses: {survivors}")
    return len(survivors)


if __name__ == "__main__":
    sys.exit(main())
