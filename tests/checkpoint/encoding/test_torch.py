"""PyTorch tensors, where torch is installed."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from jobrunner import DefinitionError
from jobrunner.checkpoint.encoding import encode_blobs
from jobrunner.testing import assert_identical
from tests.stores import write_store

torch = pytest.importorskip("torch", reason="torch is not installed; tensors cannot be made")


def round_trip(directory: Path, value: object) -> object:
    return write_store(directory, encode_blobs("n", {"x": value})).load()["x"]


DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (0, 2), (2, 3)], ids=str)
def test_a_tensor_comes_back_as_it_was(tmp_path: Path, dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(getattr(torch, dtype))
    assert_identical(tensor, round_trip(tmp_path, tensor))


def test_parameters_and_requires_grad_come_back(tmp_path: Path) -> None:
    value = {
        "p": torch.nn.Parameter(torch.ones(2)),
        "t": torch.ones(2, requires_grad=True),
        "transposed": torch.arange(6).reshape(2, 3).T,
        "conjugate": torch.tensor([1 + 2j]).conj(),
    }
    assert_identical(value, round_trip(tmp_path, value))


def test_a_state_dict_comes_back_with_tied_weights_still_tied(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    loaded = round_trip(tmp_path, model.state_dict())
    assert isinstance(loaded, collections.OrderedDict)
    assert_identical(model.state_dict(), loaded)
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(2, requires_grad=True) * 2, "autograd graph"),
        (lambda: torch.ones(2).to_sparse(), "layout"),
        (lambda: torch.ones(2, device="meta"), "meta tensor"),
    ],
    ids=["graph", "sparse", "meta"],
)
def test_a_tensor_that_cannot_be_saved_exactly_is_an_error(make: object, why: str) -> None:
    with pytest.raises(DefinitionError, match=why):
        encode_blobs("n", {"x": make()})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", ["strided", "jagged"])
def test_a_nested_tensor_is_refused_by_the_blobs_name(layout: str) -> None:
    parts = [torch.ones(2), torch.ones(3)]
    nested = torch.nested.nested_tensor(parts, layout=getattr(torch, layout))
    with pytest.raises(DefinitionError, match="Node 'n', blob 'x', item w: .*cannot be saved: "):
        encode_blobs("n", {"x": {"w": nested}})
