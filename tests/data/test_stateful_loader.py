"""Readers of loaders with a state of their own; `test_contract.py` has what all readers promise."""

import pytest

from jobrunner import DefinitionError, PlanMismatchError
from jobrunner.data import from_loader
from tests.data.test_contract import Fault, Loader


def loader(n):
    return Loader(Fault(), n)


def test_a_loader_without_a_state_is_refused():
    with pytest.raises(DefinitionError, match=r"list lacks .*state_dict.*StatefulDataLoader"):
        from_loader([1])


def test_what_a_loader_cannot_do_is_refused():
    reader = from_loader(loader(2))
    for call in (
        lambda: reader.batched(2),
        lambda: reader.sharded(0, 2),
        lambda: reader.prefetched(),
        lambda: reader.shuffled(),
    ):
        with pytest.raises(DefinitionError, match="Let the loader do so"):
            call()
    with pytest.raises(PlanMismatchError, match="another number of nodes"):
        reader.merge_state_dicts([])
    assert len(reader) == 2


def test_a_loader_that_has_failed_ends_no_pass():
    fault = Fault()
    fault.bad = frozenset({3})
    reader = from_loader(Loader(fault, 6))
    state = reader.state_dict()
    assert [reader.read(), reader.read()] == [0, 1]
    with pytest.raises(OSError, match="busy"):
        reader.read()
    for call in (reader.read, reader.state_dict):
        with pytest.raises(RuntimeError, match="Pass 0: the loader has failed before.*busy"):
            call()
    assert not reader.finished
    reader.load_state_dict(state)
    assert list(reader) == [*range(6)]


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")
@pytest.mark.parametrize("is_given", [True, False])
def test_a_loader_of_torchdata_resumes_to_the_batch_in_this_pass_and_the_next(is_given):
    torch = pytest.importorskip("torch", reason="torch is not installed")
    loaders = pytest.importorskip(
        "torchdata.stateful_dataloader", reason="pip install 'dask-jobrunner[torchdata]'"
    )

    def make():
        own = torch.Generator().manual_seed(3) if is_given else None
        torch.manual_seed(4)
        return from_loader(
            loaders.StatefulDataLoader(list(range(10)), batch_size=3, shuffle=True, generator=own)
        )

    def read(reader, most):
        items = []
        while len(items) < most:
            items += [batch.tolist() for batch in reader.limited(batches=1)]
        return items

    whole = read(make(), 12)
    for taken in range(13):
        saved = make()
        first = read(saved, taken)
        restored = make()
        restored.load_state_dict(saved.state_dict())
        torch.manual_seed(taken)
        assert first + read(restored, 12 - taken) == whole
