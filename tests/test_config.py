"""The configuration: its documentation, its use, and what its values may be."""

from pathlib import Path

import dask
import pytest
import yaml

from jobrunner import DefinitionError, config
from tests.pages import blocks

_ROOT = Path(__file__).parents[1]
_PACKAGE = Path(config.__file__).parent


def _flatten(tree, prefix=""):
    flat = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        flat |= _flatten(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return flat


_DEFAULTS = _flatten(yaml.safe_load((_PACKAGE / "jobrunner.yaml").read_text())["jobrunner"])


@pytest.mark.parametrize(("key", "value"), _DEFAULTS.items())
def test_each_key_is_documented_and_used(key, value):
    default = str(value).lower() if isinstance(value, bool) else value
    guide = (_ROOT / "docs" / "command-line.md").read_text()
    assert f"| `jobrunner.{key}` | {default} |" in guide
    readers = [path for path in _PACKAGE.rglob("*.py") if path.name != "config.py"]
    assert any(f'"{key}"' in path.read_text() for path in readers)


def test_the_file_that_the_page_shows_sets_keys_that_exist():
    (file,) = blocks("command-line.md", "yaml")
    assert _flatten(yaml.safe_load(file.code)["jobrunner"]).keys() <= _DEFAULTS.keys()


@pytest.mark.parametrize("value", [-1, "many", None, True, float("nan")])
def test_another_value_is_refused(value):
    with dask.config.set({"jobrunner.memory-share": value, "jobrunner.dashboard": value}):
        with pytest.raises(DefinitionError, match="memory-share .* must be a number >= 0"):
            config.get_number("memory-share")
        if value is not True:
            with pytest.raises(DefinitionError, match="dashboard .* must be True or False"):
                config.get_choice("dashboard", True, False)
