"""HTML for notebooks and dashboards: every text that is not `Html` is made safe to show."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from markupsafe import Markup

from jobrunner.texts.plain import clip, printable

LONGEST_TEXT = 2000
"""Characters of a text that are shown: names and values may come from a stranger's files."""

Html = Markup
"""Text that is HTML already."""


def escape(text: object) -> Html:
    """Make a text safe to show in HTML, also as an attribute."""
    if isinstance(text, Html):
        return text
    return Html.escape(printable(clip(str(text), LONGEST_TEXT)))


def join(parts: Iterable[object]) -> Html:
    """Put parts together, one after another."""
    return Html("".join(map(escape, parts)))


def tag(name: str, /, *content: object, **attributes: object) -> Html:
    """An element. In the names of attributes, ``_`` stands for ``-``, but not at the end (``class_``).

    An attribute that is None is left out.
    """
    start = name
    for key, value in attributes.items():
        if value is not None:
            start += f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"'
    return Html(f"<{start}>{join(content)}</{name}>")


def table(head: Sequence[str], rows: Iterable[Sequence[object]], left: Collection[int]) -> Html:
    """A table; the columns whose numbers are in `left` are aligned to the left, others to the right."""
    alignments = ["left" if i in left else "right" for i in range(len(head))]

    def row(name: str, cells: Sequence[object], **attributes: str) -> Html:
        aligned = []
        for cell, alignment in zip(cells, alignments, strict=True):
            style = f"text-align: {alignment}"
            aligned.append(tag(name, cell, **attributes, class_=alignment, style=style))
        return tag("tr", *aligned)

    body = join(row("td", cells) for cells in rows)
    return tag("table", tag("thead", row("th", head, scope="col")), tag("tbody", body))


def pairs(values: Mapping[str, object]) -> Html:
    """A table of names and values."""
    left = "text-align: left"
    rows = []
    for name, value in values.items():
        head = tag("th", name, scope="row", style=left)
        rows.append(tag("tr", head, tag("td", value, style=left)))
    return tag("table", tag("tbody", *rows))


def folded(summary: object, *content: object) -> Html:
    """What is shown only on a click on its summary."""
    return tag("details", tag("summary", summary), *content)


def card(kind: str, name: object, *content: object) -> Html:
    """What a notebook shows for an object."""
    return tag("div", tag("strong", f"{kind} "), tag("span", name), *content)
