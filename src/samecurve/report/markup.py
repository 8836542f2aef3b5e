"""HTML elements made from parts. Every text is escaped; only Html objects are kept as markup.

So no text of a run can become markup.
"""

import html
from collections.abc import Sequence

from samecurve.terminal import printable

_VOID = {"meta", "img", "br"}  # elements without an end tag


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


def element(name: str, /, *inner: object, **attributes: object) -> Html:
    """<name attribute="...">inner</name>.

    Attributes: a trailing underscore is removed (class_), an inner underscore becomes a dash, and
    an attribute whose value is None is left out.
    """
    attributes_html = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    start = f"<{name}{attributes_html}>"
    if name in _VOID:
        return Html(start)
    return Html(f"{start}{joined(*inner)}</{name}>")


def joined(*parts: object) -> Html:
    """Join the parts: Html objects as markup, everything else as escaped text."""
    return Html("".join(map(_as_markup, parts)))


def _as_markup(part: object) -> str:
    if isinstance(part, Html):
        return part
    return escaped(part)


def escaped(value: object) -> str:
    return html.escape(printable(str(value)), quote=True)


def table(
    head: Sequence[object], rows: Sequence[Sequence[object]], *, numbers: bool = False
) -> Html:
    """A table that scrolls by itself on a narrow screen.

    head: titles of the columns; []: none
    numbers: align all columns but the first to the right
    """
    titles = [element("th", name, scope="col") for name in head]
    body = []
    for first, *others in rows:
        cells = [element("td", cell) for cell in others]
        body.append(element("tr", element("th", first, scope="row"), *cells))
    parts = [element("tbody", *body)]
    if any(head):
        parts.insert(0, element("thead", element("tr", *titles)))
    content = element("table", *parts, class_="numbers" if numbers else None)
    return element("div", content, class_="scroll", tabindex=0)
