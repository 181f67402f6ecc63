"""Whole jobs: the DDP recipe with one buffer, Lightning Fabric, the README's program."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import gymnasium
import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from tests.learn.losses import ACTIONS, OBSERVATION, gradients, make_batch, make_loss, total
from tests.learn.ranks import LearningRanks
from tests.spawn import run_job
from torchrl_dist import (
    ConfigurationError,
    DistributedLoss,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
)
from torchrl_dist.learn import Ranks
from torchrl_dist.recipes import ddp_dqn
from torchrl_dist.runtime import current_session

ROWS, BATCH, DRAWS, UPDATES = 64, 128, 150, 5


# ---- the job of pytorch/rl#1397


def test_ranks_with_one_buffer_learn_cartpole(tmp_path: Path) -> None:
    command = ["-m", "torchrl_dist.recipes.ddp_dqn", "--updates", "500", "--output", str(tmp_path)]
    job = run_job(command, nproc=2, timeout_s=160)
    assert job.returncode == 0, str(job)
    result = json.loads(job.log(0).splitlines()[-1])
    # 1,000 rows before the first update, then 8 per update, by all ranks together.
    assert result["ranks"] == 2 and result["updates"] == 500
    assert result["rows"] == result["sum_over_ranks/frames"] == 1000 + 500 * 8
    assert result["return"] > 120, result  # the best of 24 untrained networks has 60
    assert torch.load(tmp_path / "loss.pt", weights_only=True)
    assert not (tmp_path / "replay").exists()
    assert "return" not in job.log(1)


@dataclass(frozen=True)
class Draw:
    """What a rank drew, and what determines the distribution of its draws."""

    beta: float
    mass: float
    minimum: float
    slots: list[int]


def updates_with_notes(folder: str) -> tuple[dict, list[Draw], list[list[int]]]:
    """Let rank 0 come late from each meeting, so that the others could have written meanwhile."""
    meet, draw = Ranks.any, SharedPrioritizedSampler.draw
    update_priority = SharedPrioritizedSampler.update_priority
    drawn, written = [], []

    def meet_late(ranks: Ranks, flag: bool) -> bool:
        answer = meet(ranks, flag)
        time.sleep(0.015 if ranks.is_first else 0)
        return answer

    def draw_and_note(sampler: SharedPrioritizedSampler, storage: Any, count: int) -> Any:
        found = draw(sampler, storage, count)
        drawn.append(Draw(sampler.beta, found.mass, found.minimum, found.index.tolist()))
        return found

    def update_and_note(sampler: SharedPrioritizedSampler, index: Any, *args: Any, **kw: Any):
        written.append(torch.as_tensor(index).flatten().tolist())
        return update_priority(sampler, index, *args, **kw)

    with (
        mock.patch.object(Ranks, "any", meet_late),
        mock.patch.object(SharedPrioritizedSampler, "draw", draw_and_note),
        mock.patch.object(SharedPrioritizedSampler, "update_priority", update_and_note),
    ):
        result = ddp_dqn.train(current_session(), Path(folder), updates=UPDATES, seed=0)
    return result, drawn, written


def test_an_update_of_the_recipe_is_in_law_that_of_one_process(three_ranks, tmp_path) -> None:
    # Three ranks write 6 rows between meetings. Some write the 1,000th row before others look.
    told = three_ranks.run(updates_with_notes, str(tmp_path))
    for result, _, _ in told:
        assert result["updates"] == UPDATES
        assert result["sum_over_ranks/frames"] == 1002 + UPDATES * 6
    # All draw from one state of the buffer, with one beta, before any rank writes the next row.
    for update, draws in enumerate(zip(*(drawn for _, drawn, _ in told), strict=True)):
        laws = {(d.beta, d.mass, d.minimum) for d in draws}
        assert len(laws) == 1, laws
        assert draws[0].beta == pytest.approx(0.4 + 0.6 * update / UPDATES)
        assert [len(d.slots) for d in draws] == [BATCH // 3] * 3
        assert len({tuple(d.slots) for d in draws}) == 3, "ranks drew the same rows"
    assert len({d.mass for d in told[0][1]}) == UPDATES, "priorities changed nothing"
    for _, drawn, written in told:
        assert [d.slots for d in drawn] == written, "each rank writes its rows once, in order"


def open_buffer(folder: str, ranks: int) -> TensorDictReplayBuffer:
    return TensorDictReplayBuffer(
        storage=SharedMemmapStorage(ROWS, scratch_dir=folder),
        sampler=SharedPrioritizedSampler(ROWS, alpha=0.6, beta=0.4),
        writer=SharedCursorWriter(),
        batch_size=BATCH // ranks,
        priority_key="td_error",
    )


def rows_with_priorities() -> TensorDict:
    rows = make_batch("dqn", ROWS)
    rows["td_error"] = torch.linspace(0.01, 3.0, ROWS)[:, None] ** 2
    return rows


def draw_and_learn(folder: str) -> tuple[list[list[int]], TensorDict, dict[str, torch.Tensor]]:
    loss = DistributedLoss(make_loss("dqn"), timeout_s=30)
    buffer = open_buffer(folder, loss.ranks.size)
    if loss.ranks.is_first:
        buffer.extend(rows_with_priorities())
    loss.ranks.any(False)
    drawn = [buffer.sample()["index"].flatten().tolist() for _ in range(DRAWS)]
    loss.ranks.any(False)
    batch = buffer.sample()
    total(loss(batch)).backward()
    buffer.update_tensordict_priority(batch)
    loss.ranks.any(False)
    buffer.storage.close()
    return drawn, batch, gradients(loss)


def test_ranks_draw_by_the_law_of_one_process_with_the_whole_batch(three_ranks, tmp_path) -> None:
    found = three_ranks.run(draw_and_learn, str(tmp_path / "replay"))
    priorities = (rows_with_priorities()["td_error"].flatten().numpy() + 1e-8) ** 0.6
    law = priorities / priorities.sum()
    drawn = np.concatenate([np.ravel(rows) for rows, _, _ in found])
    expected = law * len(drawn)
    statistic = ((np.bincount(drawn, minlength=ROWS) - expected) ** 2 / expected).sum()
    assert statistic < 63 + 6 * np.sqrt(2 * 63)  # chi-squared, 63 degrees of freedom
    assert all(found[0][0] != rows for rows, _, _ in found[1:]), "ranks drew the same batches"
    # Joined with their weights, their batches give one process the same gradients.
    whole = torch.cat([batch.exclude("td_error") for _, batch, _ in found])
    weights = (law / law.min()) ** -0.4
    index = whole["index"].flatten().numpy()
    np.testing.assert_allclose(whole["priority_weight"].flatten(), weights[index], rtol=1e-4)
    alone = make_loss("dqn")
    total(alone(whole)).backward()
    for _, _, gradient in found:
        for name, expected_gradient in gradients(alone).items():
            torch.testing.assert_close(gradient[name], expected_gradient, atol=1e-6, rtol=1e-4)


# ---- Lightning Fabric

FABRIC = """
import sys
import torch
from lightning_fabric import Fabric
from torchrl.data import TensorDictReplayBuffer
from torchrl.objectives import SoftUpdate

from tests.learn.losses import make_batch, make_loss
from torchrl_dist import (
    DistributedLoss, SharedCursorWriter, SharedMemmapStorage, SharedPrioritizedSampler,
)

if __name__ == "__main__":
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", precision="bf16-mixed")
    fabric.launch()
    loss = DistributedLoss(make_loss("dqn", seed=fabric.global_rank), timeout_s=30)
    optimizer = fabric.setup_optimizers(torch.optim.Adam(loss.parameters(), lr=1e-3))
    target = SoftUpdate(loss, tau=0.05)
    buffer = TensorDictReplayBuffer(
        storage=SharedMemmapStorage(256, scratch_dir=sys.argv[1]),
        sampler=SharedPrioritizedSampler(256, alpha=0.6, beta=0.4),
        writer=SharedCursorWriter(),
        batch_size=64 // fabric.world_size,
        priority_key="td_error",
    )
    buffer.extend(make_batch("dqn", 100, seed=fabric.global_rank))
    before = loss.check_drift()
    for _ in range(20):
        loss.ranks.any(False)
        batch = buffer.sample()
        optimizer.zero_grad()
        with fabric.autocast():
            value = loss(batch)["loss"]
        fabric.backward(value)
        fabric.clip_gradients(loss, optimizer, max_norm=1.0)
        optimizer.step()
        target.step()
        buffer.update_tensordict_priority(batch)
    fabric.barrier()
    told = f"{loss.ranks.size} ranks {len(buffer)} rows {before != loss.check_drift()}"
    with open(f"{sys.argv[1]}.rank{fabric.global_rank}", "w") as file:
        file.write(told)
    fabric.barrier()
    buffer.storage.close()
"""


def test_lightning_fabric(tmp_path: Path) -> None:
    """Under torchrun. tests/test_readme.py runs a page's program with Fabric's own launcher."""
    pytest.importorskip("lightning_fabric")
    script = tmp_path / "fabric_job.py"
    script.write_text(FABRIC)
    folder = str(tmp_path / "replay")
    job = run_job([str(script), folder], nproc=2)
    assert job.returncode == 0, str(job)
    for rank in range(2):
        assert Path(f"{folder}.rank{rank}").read_text() == "2 ranks 200 rows True"


# ---- what child processes inherit


class Corridor(gymnasium.Env):
    """An environment that gymnasium knows only in processes that registered it."""

    observation_space = gymnasium.spaces.Box(-1, 1, (OBSERVATION,))
    action_space = gymnasium.spaces.Discrete(ACTIONS)


def configure() -> None:
    """Set up Python in this process and, as ``init_fn``, in others."""
    gymnasium.register("Corridor-v0", entry_point=Corridor)
    torch.set_default_dtype(torch.float64)
    logging.getLogger("torchrl_dist").setLevel(logging.ERROR)


def what_reaches_the_rank() -> list[Any]:
    loss = make_loss("dqn")
    try:
        checked = DistributedLoss(loss, timeout_s=20).check_drift()
    except ConfigurationError as error:
        checked = str(error)
    return [
        os.environ.get("LEARN_SETTING"),
        dist.get_backend(),
        torch.get_default_dtype() is torch.float64,
        "Corridor-v0" in gymnasium.registry,
        logging.getLogger("torchrl_dist").level == logging.ERROR,
        checked,
    ]


@pytest.fixture
def configured() -> Iterator[None]:
    logger = logging.getLogger("torchrl_dist")
    dtype, level = torch.get_default_dtype(), logger.level
    configure()
    yield
    torch.set_default_dtype(dtype)
    logger.setLevel(level)
    del gymnasium.registry["Corridor-v0"]


def test_ranks_of_a_local_cluster_have_the_callers_environment_and_configuration(
    fork_server, monkeypatch, configured
) -> None:
    monkeypatch.setenv("LEARN_SETTING", "from the caller")
    with LearningRanks.start(2, fork_server, init_fn=configure, threads_per_process=2) as ranks:
        mine, child = ranks.run(what_reaches_the_rank)
        assert ranks.session.call(ranks.session.peers[1], torch.get_num_threads) == 2
    assert mine == child and child[:5] == ["from the caller", "gloo", True, True, True]
    with LearningRanks.start(2, fork_server) as ranks:  # the trap
        mine, child = ranks.run(what_reaches_the_rank)
    assert child[:5] == ["from the caller", "gloo", False, False, False]
    assert "float64 [16, 5] on rank 0 and torch.float32 [16, 5] on rank 1" in mine[5]
    assert "configuration" in mine[5] and mine[5] == child[5]


def test_ddp_dqn_leaves_a_file_of_others_alone(tmp_path: Path, monkeypatch, capsys) -> None:
    (tmp_path / "loss.pt").write_text("mine")
    monkeypatch.setattr("sys.argv", ["ddp_dqn", "--output", str(tmp_path)])
    with pytest.raises(SystemExit):
        ddp_dqn.main()
    assert "loss.pt already exists" in capsys.readouterr().err
    assert (tmp_path / "loss.pt").read_text() == "mine"
