"""The benchmark of the sampling law at toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.conftest import measured, run_bench
from torchrl_dist.bench import law
from torchrl_dist.errors import ConfigurationError


def test_buffers_per_worker_have_another_law_and_the_sharded_one_the_single_buffers(
    tmp_path: Path, capsys
) -> None:
    options = ["--rows", "16", "--draws", "30000", "--batch", "200", "--rounds", "1"]
    lines = measured(law, options, tmp_path)
    cells = {(cell["kind"], cell["case"], cell["way"]): cell for cell in lines}
    assert len(cells) == len(law.ALPHAS) * len(law.CASES) * len(law.WAYS)
    for (kind, case, way), cell in cells.items():
        floor = cells[kind, case, "single"]["distance"]
        assert 0 < floor < 0.03
        if way == "sharded":
            assert cell["distance"] < 1.5 * floor
        if way == "stale":
            assert cell["distance"] > 0.2
        if way == "per worker":
            assert abs(cell["distance"] - cell["exact_per_worker"]) < 2 * floor
    for kind in law.ALPHAS:
        assert cells[kind, "alike", "per worker"]["exact_per_worker"] < 1e-12
        assert cells[kind, "unequal rows", "per worker"]["exact_per_worker"] > 0.1
    # uniform draws do not see priorities; rows of a small shard come too often
    assert cells["uniform", "unequal priorities", "per worker"]["exact_per_worker"] < 1e-12
    assert cells["prioritized", "unequal priorities", "per worker"]["exact_per_worker"] > 0.2
    assert "unequal priorities" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "10"], "a multiple of --workers 4"),
        (["--workers", "1"], "--workers: got 1, expected at least 2"),
        (["--json", "/nowhere/law.jsonl"], "there is no folder /nowhere"),
    ],
)
def test_options_that_cannot_be_right_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        run_bench(law, options)
