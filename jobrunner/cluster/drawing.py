"""A session as a notebook shows it."""

from __future__ import annotations

from collections.abc import Mapping

from jobrunner.texts import Html, card, counted, folded, listed, pairs, table, tag

MOST_WORKERS = 200


def draw_session(address: str, placement: Mapping[str, str] | None, dashboard: str) -> Html:
    """Where each node is; None: the session is closed."""
    if placement is None:
        return card("Session", address, pairs({"state": "closed"}))
    nodes = dict[str, list[str]]()
    for node, worker in placement.items():
        nodes.setdefault(worker, []).append(node)
    rows = [(worker, listed(names, 12)) for worker, names in list(nodes.items())[:MOST_WORKERS]]
    title = f"{counted(len(placement), 'node')} on {counted(len(nodes), 'worker')}"
    shown = folded(title, table(("worker", "nodes"), rows, left=(0, 1))) if nodes else "no nodes"
    about = {"state": "open", "dashboard": tag("a", dashboard, href=dashboard) if dashboard else ""}
    return card("Session", address, pairs(about), tag("div", shown))
