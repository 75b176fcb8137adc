"""Commands on a whole directory: `prune` and `fsck`."""

import shutil

from jobrunner.positions import Position
from tests.cli.directories import ask, begin, invoke, lengthen_log, recorded, save
from tests.saves import Save


def test_prune_does_what_its_dry_run_shows(runs):
    before = sorted(runs.rglob("*"))
    dry = ask("prune", runs, "--keep-last", 2, "--dry-run")
    assert (dry["retired"], dry["kept"], dry["dry_run"]) == ([0, 1], [2, 3], True)
    assert sorted(runs.rglob("*")) == before
    assert dry["nbytes"] > 0
    done = ask("prune", runs, "--keep-last", 2)
    assert done == {**dry, "dry_run": False}
    assert recorded(runs) == [2, 3]
    assert not (runs / "a.0").exists()
    assert "deleted: none (" in invoke("prune", runs, "--keep-last", 2).stdout


def test_prune_keeps_epochs_that_any_option_keeps_pinned_ones_and_the_newest(runs):
    def kept(*options):
        return list(ask("prune", runs, "--dry-run", *options)["kept"])

    assert kept("--keep-every", 2) == [0, 2, 3]
    assert kept("--keep-best", "loss") == [1, 3]
    assert kept("--keep-best", "loss:max:1", "--keep-last", 1) == [0, 3]
    assert invoke("pin", runs, 2, "--label", "paper").exit_code == 0
    assert kept("--keep-best", "loss:2") == [1, 2, 3]
    unpinned = {"path": str(runs), "epoch": 2, "was_pinned": True, "pins": []}
    assert ask("unpin", runs, 2) == unpinned
    assert "Epoch 2 is not pinned." in invoke("unpin", runs, 2).stdout
    assert invoke("pin", runs, 9).exit_code == 6
    for options in ([], ["--keep-best", "loss:least"], ["--keep-best", "los"]):
        assert invoke("prune", runs, *options).exit_code == 2


def test_prune_deletes_nothing_if_a_record_that_decides_cannot_be_read(runs):
    lengthen_log(runs)
    (runs / "_log" / "0000000003.json").write_bytes(b"")  # of epoch 1
    before = sorted(runs.rglob("*"))
    for options in (["--keep-best", "loss"], ["--keep-last", 2]):
        result = invoke("prune", runs, *options)
        assert result.exit_code == 7
        assert "the record of epoch 1 cannot be read" in result.stderr
        assert sorted(runs.rglob("*")) == before
    # That of an epoch that stays tells only its metrics.
    (runs / "_log" / "0000000005.json").write_bytes(b"")  # of epoch 3, the newest
    assert ask("prune", runs, "--keep-last", 3)["retired"] == [0]
    assert recorded(runs) == [1, 2, 3]


def test_prune_is_refused_while_a_run_uses_the_directory_and_pin_is_not(tmp_path):
    run = begin(tmp_path / "k")
    save(run, 0)
    save(run, 1)
    assert invoke("prune", tmp_path / "k", "--keep-last", 1).exit_code == 9
    assert invoke("pin", tmp_path / "k", 0).exit_code == 0
    run.run.end()
    assert ask("prune", tmp_path / "k", "--keep-last", 1)["kept"] == [0, 1]


def test_fsck_explains_every_object(runs):
    again = begin(runs)
    again.run.rewind(Position(2), "a try")
    save = Save(again, Position(3))
    store = save.stores["a"]
    (runs / store).mkdir()  # a save that is under way
    for stray in ("notes.txt", "z.7", "_log/x"):
        (runs / stray).write_text("?")
    (runs / "_log" / ".0000000099.json.ab.tmp").write_text("{")
    shutil.rmtree(runs / "b.2")
    found = {finding["path"]: finding for finding in ask("fsck", runs)["objects"]}
    for status, paths in {
        "stray": ["notes.txt", "z.7", "_log/x"],
        "pending": ["_log/.0000000099.json.ab.tmp", store],
        "aside": ["a.3", "b.3"],
        "damaged": ["b.2"],
        "live": ["a.0", "_log/0000000001.json"],
    }.items():
        assert [found[path]["status"] for path in paths] == [status] * len(paths)
    assert "No entry of the log claims this name" in found["z.7"]["explanation"]
    assert "not recorded: a run is writing" in found[store]["explanation"]
    assert invoke("fsck", runs).exit_code == 7
    again.run.end()


def test_fsck_explains_and_repairs_a_damaged_log_once(runs):
    entry = runs / "_log" / "0000000002.json"
    entry.write_text("{}")
    found = {finding["path"]: finding for finding in ask("fsck", runs)["objects"]}
    assert found["_log/0000000002.json"]["status"] == "damaged"
    assert found["_log/0000000003.json"]["status"] == "live"
    result = invoke("fsck", runs)
    assert result.exit_code == 7
    said = " ".join(result.stdout.split())
    assert said.count("The log is damaged") == 1
    assert "damaged a.0, a.1, a.2 and 5 more: The log is damaged" in said
    assert f"`jobrunner fsck {runs} --repair` would do this:" in said
    planned = ask("fsck", runs)["repair"]
    repaired = ask("fsck", runs, "--repair")["repair"]
    assert (list(repaired["lost"]), repaired["rebuilt"], planned["rebuilt"]) == (["2"], [0], [0])
    assert (repaired["kept"], repaired["given_up"]) == ([1, 2, 3], {})
    assert entry.with_name(f"{entry.name}.damaged").read_text() == "{}"
    assert recorded(runs) == [0, 1, 2, 3]
    assert invoke("fsck", runs).exit_code == 0
    again = invoke("fsck", runs, "--repair")
    assert (again.exit_code, again.stdout) == (0, f"{runs}: nothing to repair.\n")
