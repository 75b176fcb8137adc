"""A checkpoint directory; and what tests import is forgotten."""

import sys

import cloudpickle
import pytest

from tests.cli.directories import begin, save


@pytest.fixture
def runs(tmp_path):
    """Directory 0 to 3, of a run that has ended."""
    manager = begin(tmp_path / "runs")
    for epoch in range(4):
        save(manager, epoch)
    manager.run.end()
    return tmp_path / "runs"


@pytest.fixture(autouse=True)
def _imports_of_scripts_are_undone():
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith(("jobrunner_script_", "cli_")):
            if name in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.unregister_pickle_by_value(sys.modules[name])
            del sys.modules[name]
