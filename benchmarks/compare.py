"""Compares two commits: what got slower.

    python benchmarks/compare.py BEFORE AFTER [--only epoch,hop] [--rounds 3]

Checks out each commit into its own work tree and runs each one's own benchmarks in turn, without peers:
they reach into the package, whose modules may have moved in between. Compares the cases that both have. Says
which benchmarks were left out because one of the commits cannot run them. Exits with 1 if a figure is
worse by more than `--slack`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

from run import HERE, NAMES, QUICK


def measure(name: str, tree: Path, path: Path) -> dict[str, tuple[float, str, bool]]:
    subprocess.run(
        [
            sys.executable,
            tree / "benchmarks" / f"bench_{name}.py",
            *QUICK[name],
            "--no-peers",
            "--json",
            path,
        ],
        env={**os.environ, "PYTHONPATH": str(tree)},
        stdout=subprocess.DEVNULL,
        check=True,
    )
    rows = json.loads(path.read_text())["rows"]
    return {
        f"{row['case']}{'' if who == 'jobrunner' else f' ({who})'}": (
            row["figures"][who],
            row["unit"],
            row["is_rate"],
        )
        for row in rows
        for who in ("jobrunner", "asking")
        if who in row["figures"]
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--only", help="names, joined by commas")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--slack", type=float, default=0.15, help="share that counts as noise")
    args = parser.parse_args()
    if args.before == args.after:
        parser.error(f"{args.before} was given twice; name two commits")
    names = args.only.split(",") if args.only else list(NAMES)
    if unknown := [name for name in names if name not in NAMES]:
        parser.error(f"there is no benchmark {', '.join(unknown)}; there are {', '.join(NAMES)}")
    git = ["git", "-C", str(HERE)]
    for commit in (args.before, args.after):
        known = [*git, "rev-parse", "--quiet", "--verify", f"{commit}^{{commit}}"]
        if subprocess.run(known, stdout=subprocess.DEVNULL).returncode:
            parser.error(f"there is no commit {commit!r} here")
    left_out: set[str] = set()
    figures: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    kinds: dict[str, tuple[str, bool]] = {}
    with tempfile.TemporaryDirectory() as scratch:
        trees: dict[str, Path] = {}
        try:
            for commit in (args.before, args.after):
                tree = Path(scratch) / commit.replace("/", "_")
                subprocess.run(
                    [*git, "worktree", "add", "--quiet", "--detach", tree, commit], check=True
                )
                trees[commit] = tree
            for _ in range(args.rounds):
                for name, (commit, tree) in itertools.product(names, trees.items()):
                    if name not in left_out:
                        try:
                            found = measure(name, tree, Path(scratch) / "found.json")
                        except subprocess.CalledProcessError:
                            print(f"bench_{name}.py does not run at {commit}: left out", flush=True)
                            left_out.add(name)
                            continue
                        for case, (value, unit, is_rate) in found.items():
                            figures[case][commit].append(value)
                            kinds[case] = unit, is_rate
        finally:
            for tree in trees.values():
                subprocess.run([*git, "worktree", "remove", "--force", tree], check=True)
    slower = 0
    for case, by_commit in figures.items():
        if len(by_commit) < len(trees):
            continue
        before, after = (statistics.median(by_commit[commit]) for commit in trees)
        unit, is_rate = kinds[case]
        change = before / after if is_rate else after / before
        noise = 1 + args.slack
        verdict = "SLOWER" if change > noise else "faster" if change < 1 / noise else ""
        slower += verdict == "SLOWER"
        print(f"{case}: {before:.4g} -> {after:.4g} {unit}  × {change:.2f}  {verdict}")
    return 1 if slower else 0


if __name__ == "__main__":
    sys.exit(main())
