"""Values arrive at other nodes and workers as they were."""

from __future__ import annotations

from typing import Any

import pytest

from jobrunner.workspace.pickles import crossing_frames, from_frames, snapshot


@pytest.mark.parametrize(
    "dtype", ["uint8", "uint16", "uint32", "uint64", "bfloat16", "float8_e5m2", "float8_e4m3fn"]
)
def test_tensors_of_all_dtypes_arrive(dtype: str) -> None:
    torch: Any = pytest.importorskip("torch")
    tensor = torch.arange(6).to(getattr(torch, dtype))
    transposed = tensor.view(2, 3).t()
    for sent in (tensor, tensor[2:4], transposed, tensor[:0], torch.nn.Parameter(tensor, False)):
        arrived = from_frames([bytes(frame) for frame in crossing_frames(sent)])
        for found in (arrived, snapshot(sent).open()):
            assert type(found) is type(sent)
            assert found.dtype is sent.dtype
            assert found.stride() == sent.stride()
            assert found.tolist() == sent.tolist()
            found.data[...] = found.data.clone()  # its memory can be written


def test_other_tensors_arrive() -> None:
    torch: Any = pytest.importorskip("torch")
    weight = torch.ones(2, requires_grad=True)
    sent = {
        "sparse": torch.eye(2).to_sparse(),
        "w": [weight, weight],
        "layer": torch.nn.Linear(1, 2),
    }
    arrived = from_frames(crossing_frames(sent))
    assert arrived["sparse"].to_dense().tolist() == [[1, 0], [0, 1]]
    assert arrived["w"][0] is arrived["w"][1]
    assert arrived["w"][0].requires_grad
    assert arrived["layer"].weight.tolist() == sent["layer"].weight.tolist()
