"""Whole jobs: the DDP recipe with one buffer, Lightning Fabric, the README's program."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torchrl.data import TensorDictReplayBuffer

from tests.learn.losses import gradients, make_batch, make_loss, total
from tests.learn.ranks import LearningRanks
from tests.spawn import run_job
from torchrl_dist import (
    DistributedLoss,
    SharedCursorWriter,
    SharedMemmapStorage,
    SharedPrioritizedSampler,
)
from torchrl_dist.learn import Ranks
from torchrl_dist.recipes import ddp_dqn
from torchrl_dist.runtime import current_session

ROWS, BATCH, DRAWS = 64, 128, 150


# ---- the job of pytorch/rl#1397


@pytest.mark.timeout(170)
def test_four_ranks_with_one_buffer_learn_cartpole(tmp_path: Path) -> None:
    command = ["-m", "torchrl_dist.recipes.ddp_dqn", "--updates", "500", "--output", str(tmp_path)]
    job = run_job(command, nproc=4, timeout_s=160)
    assert job.returncode == 0, job
    result = json.loads(job.log(0).splitlines()[-1])
    # 1,000 rows before the first update, then 8 per update, by all ranks together.
    assert result["ranks"] == 4 and result["updates"] == 500
    assert result["rows"] == result["sum_over_ranks/frames"] == 1000 + 500 * 8
    assert result["return"] > 120, result  # the best of 24 untrained networks has 60
    assert torch.load(tmp_path / "loss.pt", weights_only=True)
    assert not (tmp_path / "replay").exists()
    assert all("return" not in job.log(rank) for rank in (1, 2, 3))


def first_updates(folder: str) -> dict:
    """Rank 0 comes late from each meeting, when the others have written."""
    meet = Ranks.any

    def late(ranks: Ranks, flag: bool) -> bool:
        answer = meet(ranks, flag)
        time.sleep(0.015 if ranks.is_first else 0)
        return answer

    with mock.patch.object(Ranks, "any", late):
        return ddp_dqn.train(current_session(), Path(folder), updates=3, seed=0)


def test_ranks_that_do_not_divide_the_first_rows_start_together(three_ranks, tmp_path) -> None:
    # They write 6 rows between meetings: the 1,000th while some have not looked yet.
    for result in three_ranks.run(first_updates, str(tmp_path)):
        assert result["updates"] == 3
        assert result["sum_over_ranks/frames"] == 1002 + 3 * 6


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
    # Their batches joined, with their weights, give one process the same gradients.
    whole = torch.cat([batch.exclude("td_error") for _, batch, _ in found])
    weights = (law / law.min()) ** -0.4
    index = whole["index"].flatten().numpy()
    np.testing.assert_allclose(whole["priority_weight"].flatten(), weights[index], rtol=1e-4)
    alone = make_loss("dqn")
    total(alone(whole)).backward()
    for _, _, gradient in found:
        for name, expected_gradient in gradients(alone).items():
            torch.testing.assert_close(gradient[name], expected_gradient, atol=1e-6, rtol=1e-4)


def count_priority_writes(folder: str) -> int:
    """How many priorities this rank writes in one update."""
    loss = DistributedLoss(make_loss("dqn"), timeout_s=30)
    buffer = open_buffer(folder, loss.ranks.size)
    if loss.ranks.is_first:
        buffer.extend(rows_with_priorities())
    loss.ranks.any(False)
    written = []
    update = buffer.sampler.update_priority
    buffer.sampler.update_priority = lambda index, *a, **k: (
        written.append(torch.as_tensor(index).numel()), update(index, *a, **k),
    )  # fmt: skip
    batch = buffer.sample()
    loss(batch)["loss"].backward()
    buffer.update_tensordict_priority(batch)
    loss.ranks.any(False)
    buffer.storage.close()
    return sum(written)


def test_the_priority_of_each_drawn_row_is_written_once(two_ranks: LearningRanks, tmp_path) -> None:
    assert sum(two_ranks.run(count_priority_writes, str(tmp_path / "replay"))) == BATCH


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


@pytest.mark.parametrize("launcher", ["fabric", "torchrun"])
def test_lightning_fabric(tmp_path: Path, launcher: str) -> None:
    pytest.importorskip("lightning_fabric")
    script = tmp_path / "fabric_job.py"
    script.write_text(FABRIC)
    folder = str(tmp_path / "replay")
    if launcher == "torchrun":
        job = run_job([str(script), folder], nproc=2)
        assert job.returncode == 0, job
    else:  # Fabric's launcher starts the second process itself
        import os

        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        subprocess.run(
            [sys.executable, str(script), folder], check=True, timeout=100,
            env={**variables, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    for rank in range(2):
        assert Path(f"{folder}.rank{rank}").read_text() == "2 ranks 200 rows True"


# ---- what child processes inherit


def what_reaches_the_rank() -> tuple[str | None, int, str]:
    import os

    return os.environ.get("LEARN_SETTING"), torch.get_num_threads(), dist.get_backend()


def test_ranks_of_a_local_cluster_have_the_callers_environment(fork_server, monkeypatch) -> None:
    monkeypatch.setenv("LEARN_SETTING", "from the caller")
    with LearningRanks.start(2, fork_server) as ranks:
        _, child = ranks.run(what_reaches_the_rank)
    assert child == ("from the caller", 1, "gloo")
