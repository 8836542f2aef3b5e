"""HTML from parts: a text is always escaped, only what an element was made of is not.

Nothing that a run says can become markup.
"""

import html
from typing import Any

from samecurve.observe.console import printable

_VOID = {"meta", "img", "br"}  # elements that have no end


class Html(str):
    """Markup that is safe as it stands."""

    __slots__ = ()


def element(name: str, /, *inner: Any, **attributes: Any) -> Html:
    """<name attribute="...">inner</name>.

    Attributes: a trailing underscore is left out (class_), an inner one is a dash; None leaves the
    attribute out.
    """
    given = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{escaped(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{given}>" + ("" if name in _VOID else f"{joined(*inner)}</{name}>"))


def joined(*parts: Any) -> Html:
    """Elements as they are, all else as text."""
    return Html("".join(part if isinstance(part, Html) else escaped(part) for part in parts))


def escaped(value: Any) -> str:
    return html.escape(printable(str(value)), quote=True)


def table(head: list[Any], rows: list[list[Any]], numbers: bool = False) -> Html:
    """numbers: all columns but the first are set to the right.

    A table scrolls by itself on a narrow screen.
    """
    cells = (
        element("thead", element("tr", *(element("th", name, scope="col") for name in head)))
        if any(head)
        else ""
    )
    body = element(
        "tbody",
        *(
            element(
                "tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])
            )
            for row in rows
        ),
    )
    return element(
        "div",
        element("table", cells, body, class_="numbers" if numbers else None),
        class_="scroll",
        tabindex=0,
    )
