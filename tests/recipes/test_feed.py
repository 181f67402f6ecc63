"""Batches that are drawn and copied while the last update runs.

Without a GPU all but the copy itself: what is drawn when, and that nothing drawn is lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase

from tests.recipes.learners import a_learner, recipe_of
from torchrl_dist import local_cluster
from torchrl_dist.recipes.apex.config import ApexConfig
from torchrl_dist.recipes.sac.config import SACConfig
from torchrl_dist.recipes.training.feed import Feed, moved

CPU = torch.device("cpu")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


class Source:
    """Gives numbered batches, where it has some; ``events`` says when each was drawn."""

    def __init__(self, count: int, rows: int = 4) -> None:
        self.left = count
        self.rows = rows
        self.drawn = 0
        self.events: list[str] = []

    def __call__(self) -> TensorDictBase | None:
        if not self.left:
            return None
        self.left -= 1
        self.drawn += 1
        self.events.append(f"draw {self.drawn}")
        return TensorDict({"x": torch.full((self.rows, 3), float(self.drawn))}, [self.rows])


def learn_from(feed: Feed, events: list[str]) -> list[int]:
    seen = []
    while (batch := feed.take()) is not None:
        seen.append(int(batch["x"][0, 0]))
        events.append(f"update {seen[-1]}")
        feed.prepare()
        events.append(f"priorities {seen[-1]}")
    return seen


def test_the_next_batch_is_drawn_between_an_update_and_what_waits_for_it() -> None:
    source = Source(2)
    assert learn_from(Feed(source, CPU, ahead=True), source.events) == [1, 2]
    assert source.events == [
        "draw 1", "update 1", "draw 2", "priorities 1", "update 2", "priorities 2",
    ]  # fmt: skip


def test_on_the_cpu_each_batch_is_drawn_with_the_last_ones_priorities() -> None:
    source = Source(2)
    assert learn_from(Feed(source, CPU), source.events) == [1, 2]
    assert source.events == [
        "draw 1", "update 1", "priorities 1", "draw 2", "update 2", "priorities 2",
    ]  # fmt: skip


@pytest.mark.parametrize("ahead", [False, True])
def test_drawn_batches_are_returned_once_even_after_a_pause(ahead: bool) -> None:
    source = Source(1)
    feed = Feed(source, CPU, ahead=ahead)
    feed.prepare()
    feed.prepare()  # the first is not dropped
    source.left = 3
    assert learn_from(feed, []) == list(range(1, source.drawn + 1))
    assert feed.take() is None
    source.left = 1
    assert learn_from(feed, []) == [source.drawn]


@pytest.mark.parametrize(
    ("kind", "ahead", "more"),
    [
        (ApexConfig, True, {"updates_per_batch": 3}),
        (SACConfig, False, {"batch_size": 32, "updates_per_frame": 0.125}),
    ],
    ids=["apex", "sac"],
)
def test_a_recipe_learns_once_from_every_batch_it_draws(
    kind: Any, more: dict[str, Any], ahead: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn = []

    def counted(draw: Any, device: torch.device) -> Feed:
        def one() -> Any:
            if (batch := draw()) is not None:
                drawn.append(batch)
            return batch

        return Feed(one, device, ahead=ahead)

    monkeypatch.setattr(recipe_of(kind), "Feed", counted)
    config = kind(
        hidden=(8,), frames_per_batch=32, envs_per_collector=2, total_frames=320, capacity=1000,
        learning_starts=64, device="cpu", output_dir=str(tmp_path), **more,
    )  # fmt: skip
    with local_cluster({"learner": 1}) as session:
        learner = a_learner(config, session)
        frames = 0
        for report in learner.collector:
            frames += 32
            learner.learn(report, frames)
            assert len(drawn) == learner.updates
        before = learner.updates
        if kind is ApexConfig:  # with half of the collectors lost
            for half in (1, 2):
                learner.learn(report, frames + 16 * half)
            assert learner.updates - before == 3 == config.updates_per_batch
        learner.close()
    assert frames == 320
    if kind is ApexConfig:
        assert before in (24, 27)  # an actor keeps its last steps for their sums
        assert all("td_error" in batch for batch in drawn)
    else:
        assert before > 20


@needs_gpu
def test_a_gpu_gets_every_number_while_it_computes() -> None:
    """Each batch is overwritten on the host as soon as it was handed over."""
    device = torch.device("cuda", 0)
    shared = TensorDict({"x": torch.zeros(4096, 64)}, [4096])
    number = iter(range(1, 51))

    def draw() -> TensorDictBase | None:
        shared["x"].fill_(float(value := next(number, 0)))
        return shared if value else None

    feed = Feed(draw, device)
    heavy = torch.randn(2048, 2048, device=device)
    sums = []
    while (batch := feed.take()) is not None:
        assert batch["x"].device == device
        heavy = torch.tanh(heavy @ heavy)
        sums.append(batch["x"].mean())
        del batch
        feed.prepare()
    assert torch.stack(sums).tolist() == [float(n) for n in range(1, 51)]


@needs_gpu
def test_a_rollout_may_be_overwritten_once_it_was_moved() -> None:
    data = TensorDict({"x": torch.ones(1024, 1024)}, [1024])
    there = moved(data, torch.device("cuda", 0))
    data["x"].zero_()
    assert bool((there["x"] == 1).all())
