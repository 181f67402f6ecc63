"""Tensors as NumPy sees them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrl_dist.tensors import DTYPES, NAMES, array_of, is_plain


@pytest.mark.parametrize("name", DTYPES)
def test_names_of_dtypes_are_numpys(name: str) -> None:
    tensor = torch.zeros(2, dtype=DTYPES[name])
    assert tensor.numpy().dtype == np.dtype(name) and NAMES[tensor.dtype] == name
    assert is_plain(tensor)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "other",
    [
        np.zeros(2),
        torch.zeros(2, dtype=torch.bfloat16),
        torch.zeros(2, device="meta"),
        torch.zeros(2).to_sparse(),
        torch.zeros(2, dtype=torch.complex64).conj(),
        torch.zeros(2, dtype=torch.complex64).conj().imag,
        torch.nested.nested_tensor([torch.zeros(1), torch.zeros(2)]),
        torch.nn.Parameter(torch.zeros(2)),
        torch.zeros(2).as_subclass(Subclass),
        torch._efficientzerotensor(2),
    ],
    ids="array bfloat16 meta sparse conj neg nested parameter subclass zero".split(),
)
def test_a_tensor_that_an_array_cannot_show_is_not_plain(other: object) -> None:
    assert not is_plain(other)


def test_an_array_is_the_memory_of_the_tensor_where_numpy_can_see_it() -> None:
    tensor = torch.zeros(3)
    array_of(tensor)[1] = 5
    assert tensor.tolist() == [0, 5, 0]


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(4.0, requires_grad=True),
        torch.arange(4.0).to(torch.bfloat16),
        torch.arange(4).to(torch.float8_e4m3fn),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    ],
    ids=["gradient", "bfloat16", "float8", "conj", "neg"],
)
def test_an_array_has_the_bytes_of_any_other_tensor(tensor: torch.Tensor) -> None:
    plain = tensor.detach().resolve_conj().resolve_neg()
    assert array_of(tensor).tobytes() == plain.view(torch.uint8).numpy().tobytes()
