"""Runs all benchmarks and writes the table of docs/performance.md.

    python benchmarks/run.py [--only epoch,hop] [--quick] [--no-peers] [--out DIRECTORY] [--docs]

Each benchmark runs in a process of its own and leaves its JSON in the directory. The table is of all
that the directory has. ``--docs`` puts it between the markers in the page.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "performance.md"
BEGIN, END = "<!-- table: python benchmarks/run.py --docs -->", "<!-- end of the table -->"
NAMES = [
    "epoch",
    "values",
    "scale",
    "readers",
    "recovery",
    "checkpoint",
    "goodput",
    "objects",
]
QUICK = {
    "epoch": ["--rounds", "1", "--epochs", "50"],
    "values": ["--rounds", "1"],
    "scale": ["--rounds", "2", "--nodes", "1000", "--epochs", "5000", "--workers", "8"],
    "readers": ["--rounds", "1", "--records", "100000"],
    "recovery": ["--rounds", "1"],
    "checkpoint": ["--rounds", "1", "--cases", "big,features"],
    "goodput": ["--rounds", "1"],
    "objects": ["--rounds", "1"],
}


def run(name: str, out: Path, options: list[str]) -> None:
    print(f"== {name}", flush=True)
    command = [sys.executable, HERE / f"bench_{name}.py", *options]
    subprocess.run([*command, "--json", out / f"{name}.json"], check=True)


def read(out: Path) -> list[dict[str, Any]]:
    """The reports in a directory."""
    paths = [out / f"{name}.json" for name in NAMES]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def table(reports: list[dict[str, Any]]) -> str:
    machine = reports[0]["machine"]
    loads = [report["machine"]["load"] for report in reports]
    versions = ", ".join(f"{name} {number}" for name, number in machine["versions"].items())
    lines = [
        (
            f"{machine['cores']} cores, {machine['system']} {machine['processor']}, Python "
            f"{machine['python']}, {versions}. Medians of one run of each benchmark; the load at its "
            f"end was {min(loads):.1f} to {max(loads):.1f}."
        ),
        "",
        "| case | jobrunner | others | target |",
        "|---|---|---|---|",
    ]
    for report in reports:
        for row in report["rows"]:
            ours = row["figures"]["jobrunner"]
            others = ", ".join(
                f"{name} {value:.3g}"
                for name, value in row["figures"].items()
                if name != "jobrunner"
            )
            remarks = ". ".join(filter(None, [others, row["note"]]))
            missed = ", **missed**" if row["is_met"] is False else ""
            lines.append(
                f"| {row['case']} | {ours:.3g} {row['unit']} | {remarks} | "
                f"{row['target']}{missed} |"
            )
    skipped = [f"{peer}: {why}" for report in reports for peer, why in report["skipped"].items()]
    if skipped:
        lines += ["", "Left out: " + "; ".join(skipped) + "."]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", help="names, joined by commas")
    parser.add_argument("--quick", action="store_true", help="small, in a few minutes")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--out", type=Path, default=HERE / "results")
    parser.add_argument("--docs", action="store_true", help="write the table to the docs")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    names = args.only.split(",") if args.only else NAMES
    for name in names:
        options = QUICK[name] if args.quick else []
        run(name, args.out, [*options, *["--no-peers"] * args.no_peers])
    text = table(read(args.out))
    print(text)
    if args.docs:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
