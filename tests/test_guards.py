"""The reverts of ``tests/guards.py`` apply to the package as it is, and their tests exist."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.guards import GUARDS, PACKAGE, ROOT, Guard, RottenError, reverted


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.name)
def test_a_guard_is_found_once_and_its_test_exists(guard: Guard) -> None:
    for path, text in reverted(guard, ROOT / PACKAGE).items():
        assert text != path.read_text()
        if path.suffix == ".py":
            ast.parse(text)
    file, _, test = guard.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in (ROOT / file).read_text()


def test_guards_have_names_of_their_own_and_every_promise_of_replay_has_one() -> None:
    assert len({guard.name for guard in GUARDS}) == len(GUARDS)
    table = (ROOT / PACKAGE / "replay" / "__init__.py").read_text()
    rows = table.split("=\ninvariant")[1].split('"""')[0]
    for promise in {guard.promise for guard in GUARDS if guard.folder == "replay"}:
        assert promise in rows


def test_a_text_that_is_missing_or_there_twice_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "replay").mkdir()
    guard = Guard("name", "promise", "replay", "any", {"x = 1": "x = 2"}, "tests/test_guards.py")
    for text in ("y = 1", "x = 1\nx = 1"):
        (tmp_path / "replay" / "part.py").write_text(text)
        with pytest.raises(RottenError, match=r"found it in \[.*\]; adapt"):
            reverted(guard, tmp_path)
