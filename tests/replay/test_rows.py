"""Rows of every allowed content come back as they were."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import MetaData, NonTensorData, NonTensorStack, TensorDict, tensorclass
from torchrl.data import ReplayBuffer

from torchrl_dist import (
    ConfigurationError,
)
from torchrl_dist.replay.node.cursor import SharedCursor
from torchrl_dist.replay.row import rows
from torchrl_dist.replay.row.spec import RowSpec

CAPACITY = 24


@tensorclass
class Step:
    obs: torch.Tensor
    label: str
    extra: torch.Tensor | None = None


def agents_rows(start: int, count: int, *, task: Any = None) -> TensorDict:
    """Make rows of three agents, with nested batch sizes, empty nodes, text and a tensorclass.
    Every field tells the row's number."""
    number = torch.arange(start, start + count)
    tasks = NonTensorStack(*[f"task {n}" for n in number.tolist()]) if task is None else task
    agents = number[:, None].expand(count, 3).clone()
    return TensorDict(
        {
            "number": number,
            "agents": TensorDict(
                {
                    "obs": agents[..., None].double(),
                    "hand": TensorDict(
                        {"cards": agents[..., None].expand(count, 3, 2) + 0}, [count, 3, 2]
                    ),
                    "names": NonTensorStack(
                        *[NonTensorStack(*[[n, k] for k in "abc"]) for n in number.tolist()]
                    ),
                },
                [count, 3],
            ),
            "empty": TensorDict({}, [count]),
            "deep": TensorDict({"empty": TensorDict({}, [count, 3])}, [count]),
            "task": tasks,
            "step": Step(obs=number + 0.5, label="same", batch_size=[count]),
        },
        [count],
    )


def check_agents_rows(found: TensorDict, *, text: bool = True) -> None:
    """Check rows of :func:`agents_rows`, whichever they are."""
    count, number = found.batch_size[0], found["number"]
    assert found["agents"].batch_size == (count, 3)
    assert found["agents", "hand"].batch_size == (count, 3, 2)
    assert found["empty"].batch_size == (count,) and found["empty"].is_empty()
    assert found["deep", "empty"].batch_size == (count, 3)
    assert (found["agents", "obs"] == number[:, None, None]).all()
    assert (found["agents", "hand", "cards"] == number[:, None, None]).all()
    step = found.get("step")
    assert isinstance(step, Step) and (step.obs == number + 0.5).all() and step.extra is None
    if text:
        expected = [f"task {n}" for n in number.tolist()]
        assert list(found["task"]) == expected and list(step.label) == ["same"] * count
        names = found["agents"].get("names").tolist()
        assert names == [[[n, k] for k in "abc"] for n in number.tolist()]


def test_rows_of_a_tensorclass_come_back_as_such(make_buffer) -> None:
    rb = make_buffer(kind=ReplayBuffer, uniform=True)
    rb.extend(Step(obs=torch.arange(5.0), label="a", batch_size=[5]))
    rb.extend([Step(obs=torch.tensor(5.0), label="b", batch_size=[])] * 2)
    rb.add(Step(obs=torch.tensor(6.0), label="c", batch_size=[]))
    assert isinstance(rb.sample(), Step) and isinstance(rb[0], Step)
    assert rb[:].obs.tolist() == [0, 1, 2, 3, 4, 5, 5, 6] and list(rb[:].label) == [*"aaaaabbc"]
    with pytest.raises(ConfigurationError, match="stores it as a Step of batch size"):
        rb.extend(rb[:].to_tensordict())
    with pytest.raises(ConfigurationError, match="missing 'extra'|unknown 'extra'"):
        rb.extend(Step(obs=torch.zeros(2), label="d", extra=torch.zeros(2), batch_size=[2]))


def test_a_tensorclass_that_was_not_imported_is_named_and_not_imported(tmp_path: Path) -> None:
    data = TensorDict({"step": Step(obs=torch.zeros(2), label="", batch_size=[2])}, [2])
    entry = rows.spec_of(data).as_json()
    for name in ("this.antigravity:Step", "json:dumps", "torch:Tensor", f"{__name__}:nothing"):
        entry["nodes"][-1]["tensorclass"] = name
        spec = RowSpec.from_json(entry)
        with pytest.raises(ConfigurationError, match=name.replace(":", ".") + ", which .* import"):
            rows.build([torch.zeros(2), torch.zeros(2, 256)], spec, (2,))


PLAIN = [
    "", "text", "\u00e9\u0000\U0001f600\ud800", 0, -(2**70), True, 0.1, float("inf"), None, [], {},
    {"a": [1, None, {"b": "c"}], "": False},
]  # fmt: skip


def test_every_value_that_json_can_hold_comes_back_with_its_type() -> None:
    values = NonTensorStack(*[NonTensorData(value) for value in PLAIN])
    data = TensorDict({"x": torch.zeros(len(PLAIN)), "value": values}, [len(PLAIN)])
    spec = rows.spec_of(data)
    assert RowSpec.from_json(spec.as_json()) == spec
    columns = rows.tensors(rows.matching_columns(data, spec), spec)
    found = rows.build(columns, spec, (len(PLAIN),))
    assert [(type(v), v) for v in found.get("value").tolist()] == [(type(v), v) for v in PLAIN]
    assert rows.build([column[:0] for column in columns], spec, (0,)).batch_size == (0,)


@pytest.mark.parametrize(
    "value", [(1, 2), b"bytes", {1: 2}, {1, 2}, np.float32(1), [("nested",)], torch.nn.Linear(1, 1)]
)
def test_other_values_are_refused_by_name(value: Any) -> None:
    data = TensorDict({"x": torch.zeros(2), "odd": NonTensorData(value, batch_size=[2])}, [2])
    with pytest.raises(ConfigurationError, match="key 'odd' holds a .* convert the value to one"):
        rows.spec_of(data)


def test_tensors_that_are_not_dense_are_refused() -> None:
    plain = torch.ones(2, 3)
    jagged = torch.nested.nested_tensor([plain[0], plain[1, :2]], layout=torch.jagged)
    quantized = torch.quantize_per_tensor(plain, 0.1, 3, torch.quint8)
    for value in (plain.to_sparse(), jagged, quantized):
        with pytest.raises(ConfigurationError, match="key 'odd' holds a sparse, nested or quant"):
            rows.spec_of(TensorDict({"x": plain, "odd": value}, [2]))


def _flatten_agents(data: TensorDict) -> None:
    data["agents"].batch_size = [2]


def test_rows_that_differ_in_nodes_or_text_are_refused_and_nothing_is_written(make_buffer) -> None:
    rb = make_buffer(uniform=True)
    rb.extend(agents_rows(0, 10))
    wrong = {
        "'agents' is .* stores it as a TensorDict of batch size .n, 3.": _flatten_agents,
        "missing 'task'": lambda data: data.pop("task"),
        "unknown 'other'": lambda data: data.set("other", NonTensorData("x", batch_size=[2])),
        "'empty' is": lambda data: data.pop("empty"),
        "'more' is": lambda data: data.set("more", TensorDict({}, [2])),
        "'task' is a tensor, but the buffer stores": lambda data: data.set("task", torch.zeros(2)),
        "'number' is not a tensor": lambda data: data.set(
            "number", NonTensorData("x", batch_size=[2])
        ),
        "'task' takes 302 bytes .* limit it to 256": lambda data: data.set(
            "task", NonTensorData(300 * "x", batch_size=[2])
        ),
        "'step' is": lambda data: data.set("step", data.get("step").to_tensordict()),
    }
    for message, change in wrong.items():
        data = agents_rows(50, 2)
        change(data)
        with pytest.raises(ConfigurationError, match=message):
            rb.extend(data)
    assert len(rb) == rb.write_count == 10
    check_agents_rows(rb[:])


def test_the_first_rows_make_room_for_longer_text() -> None:
    for longest, width in ((0, 256), (126, 256), (127, 512), (5000, 16384)):
        text = NonTensorStack("", "x" * longest)
        spec = rows.spec_of(TensorDict({"x": torch.zeros(2), "text": text}, [2]))
        assert [column.shape for column in spec.columns if column.text] == [(width,)], longest


def test_rows_taken_apart_elsewhere_fit_if_their_text_does() -> None:
    def batch(length: int, **more: Any) -> TensorDict:
        return TensorDict({"x": torch.zeros(2), "text": NonTensorData(length * "x"), **more}, [2])

    own, long = rows.spec_of(batch(1)), rows.spec_of(batch(200))
    assert own != long
    for length, spec in ((1, own), (200, long), (254, long)):
        columns = rows.matching_columns(batch(length), spec)
        fitted = rows.fitted(columns, spec, own)
        found = rows.build(rows.tensors(fitted, own), own, (2,))
        assert list(found["text"]) == 2 * [length * "x"]
    with pytest.raises(ConfigurationError, match="'text' takes more than the 256 bytes"):
        rows.fitted(rows.matching_columns(batch(255), long), long, own)
    other = rows.spec_of(batch(1, y=torch.zeros(2), empty=TensorDict({}, [2])))
    columns = rows.matching_columns(batch(1), own)
    with pytest.raises(ConfigurationError, match="missing 'y'; 'empty' is"):
        rows.fitted(columns, own, other)
    assert (
        rows.spec_of(TensorDict({"x": torch.zeros(2), "meta": MetaData("m")}, [2])).columns[0].text
    )


def test_stacks_of_rows_with_different_keys_or_shapes_are_refused() -> None:
    def row(**more: torch.Tensor) -> TensorDict:
        return TensorDict({"x": torch.zeros(()), **more}, [])

    for stack, message in (
        ([row(), row(y=torch.zeros(()))], r"keys \['y'\] are missing in some"),
        ([row(y=torch.zeros(1)), row(y=torch.zeros(2))], "key 'y' has different shapes"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            rows.spec_of(TensorDict.lazy_stack(stack))


@pytest.mark.parametrize(
    "values",
    [
        torch.arange(12.0).view(4, 3),
        torch.arange(12.0).view(3, 4).T,
        torch.arange(8.0).view(4, 2)[:, ::2].expand(4, 3),
        torch.arange(24.0).view(8, 3)[2:6],
        torch.arange(12.0).view(4, 3).requires_grad_() * 1,
        torch.complex(torch.zeros(4, 1), torch.arange(4.0)[:, None]).conj().imag.expand(4, 3),
        torch.nn.Parameter(torch.arange(12.0).view(4, 3)),
    ],
    ids=["plain", "transposed", "expanded", "part", "grad", "negative", "parameter"],
)
def test_values_of_any_memory_layout_come_back(make_buffer, values: torch.Tensor) -> None:
    buffer = make_buffer()
    buffer.extend(TensorDict({"x": torch.full((2, 3), -1.0)}, [2]))  # the rows are known now
    index = buffer.extend(TensorDict({"x": values}, [4]))
    assert buffer[index]["x"].equal(values.detach().clone())


def test_values_that_another_thread_replaces_during_a_write_stay_in_memory(
    make_buffer, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, values = make_buffer(), []
    buffer.extend(TensorDict({"x": torch.zeros(2, 300)}, [2]))
    data = TensorDict({"x": torch.ones(4, 300)}, [4])
    append = SharedCursor.append

    def interrupted(*arguments: Any) -> Any:
        data["x"] = torch.full((4, 300), 2.0)
        values.extend(torch.full((4, 300), 3.0) for _ in range(8))  # use memory that was freed
        return append(*arguments)

    monkeypatch.setattr(SharedCursor, "append", interrupted)
    index, _ = buffer.storage.append(data)
    assert bool(values) == buffer.storage.directory.kernel.appends
    assert (buffer[index]["x"] == 1).all()
