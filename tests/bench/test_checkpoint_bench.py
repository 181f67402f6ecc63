"""The benchmark of checkpoints at toy size."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench.conftest import measured, run_bench
from torchrl_dist.bench import checkpoint
from torchrl_dist.errors import ConfigurationError


def test_every_case_is_measured_and_writes_the_bytes_of_its_rows(tmp_path: Path, capsys) -> None:
    options = ["--kinds", "S", "--rows", "20000", "--rounds", "1", "--to", str(tmp_path)]
    lines = measured(checkpoint, options, tmp_path, picture=False)
    found = {line["case"]: line for line in lines}
    assert tuple(found) == checkpoint.CASES
    for case, line in found.items():
        assert line["rate_mib_s"] > 0
        assert 20_000 * 45 <= line["bytes"] < 20_000 * 80
        assert (line["longest_extend_ms"] is not None) == (case == "ours, written")
    assert found["cp"]["of_cp"] == 1 and "of cp" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["lines.jsonl"]


def test_a_folder_that_is_missing_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="there is no folder /nowhere"):
        run_bench(checkpoint, ["--to", "/nowhere"])
