"""PyTorch tensors, where torch is installed."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable

import pytest

from jobrunner import DefinitionError
from jobrunner.checkpoint.encoding import encode_blobs
from jobrunner.testing import assert_identical
from tests.stores import written_and_read

torch = pytest.importorskip("torch", reason="torch is not installed; tensors cannot be made")

DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32"),
    *("float64", "complex64", "complex128"),
]


def test_tensors_come_back_as_they_were() -> None:
    shapes = [(), (3,), (0, 2), (2, 3)]
    value = [
        *(
            torch.ones(shape).to(getattr(torch, it))
            for shape, it in itertools.product(shapes, DTYPES)
        ),
        torch.nn.Parameter(torch.ones(2)),
        torch.ones(2, requires_grad=True),
        torch.arange(6).reshape(2, 3).T,
        torch.tensor([1 + 2j]).conj(),
    ]
    assert_identical(value, written_and_read(value))


def test_a_state_dict_comes_back_with_tied_weights_still_tied() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    model[1].weight = model[0].weight
    loaded = written_and_read(model.state_dict())
    assert isinstance(loaded, collections.OrderedDict)
    assert_identical(model.state_dict(), loaded)
    assert loaded["0.weight"].data_ptr() == loaded["1.weight"].data_ptr()


def nested(layout: str) -> object:
    parts = [torch.ones(2), torch.ones(3)]
    return torch.nested.nested_tensor(parts, layout=getattr(torch, layout))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda: torch.ones(2, requires_grad=True) * 2, "autograd graph"),
        (lambda: torch.ones(2).to_sparse(), "layout"),
        (lambda: torch.ones(2, device="meta"), "meta tensor"),
        (lambda: nested("strided"), "cannot be saved: "),
        (lambda: nested("jagged"), "cannot be saved: "),
    ],
    ids=["graph", "sparse", "meta", "nested", "jagged"],
)
def test_a_tensor_that_cannot_be_saved_exactly_is_an_error(
    make: Callable[[], object], why: str
) -> None:
    with pytest.raises(DefinitionError, match=f"Node 'n', blob 'x', item w: .*{why}"):
        encode_blobs("n", {"x": {"w": make()}})
