"""The keys of the JSON that each command prints."""

import re
from pathlib import Path

from jobrunner.positions import Position
from tests.cli.directories import ask, begin


def documented(command):
    """The keys that the guide names for a command, and those of what some of them hold."""
    guide = (Path(__file__).parents[2] / "docs" / "command-line.md").read_text()
    found = re.search(rf"^\| `{command}` \| (`path`.*|`a`.*) \|$", guide, re.M)
    assert found is not None, command
    each = dict(re.findall(r"`(\w+)` \(each ([^)]*)\)", found[1]))
    keys = re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", found[1]))
    return set(keys), {key: set(re.findall(r"`(\w+)`", text)) for key, text in each.items()}


def test_the_json_of_every_command_has_the_keys_that_the_guide_names(runs, tmp_path):
    again = begin(runs)
    again.run.rewind(Position(2), "a try")
    again.run.end()
    for command, *arguments in (
        ("ls", runs),
        ("ls ROOT", tmp_path),
        ("info", runs, 2),
        ("verify", runs, "--deep"),
        ("diff", f"{runs}@1", "@2"),
        ("compare", runs, runs),
        ("pin", runs, 1),
        ("unpin", runs, 1),
        ("restore", runs, 3),
        ("copy", runs, 3, tmp_path / "copy"),
        ("prune", runs, "--keep-last", 2),
        ("fsck", runs),
        ("stats", runs),
        ("report", runs, "-o", tmp_path / "page.html"),
    ):
        keys, each = documented(command)
        told = ask(command.split()[0], *arguments)
        assert set(told) == keys, command
        for key, expected in each.items():
            items = list(told[key].values() if isinstance(told[key], dict) else told[key])
            assert items, (command, key)
            assert all(set(item) <= expected for item in items), (command, key)
