"""The page's Data shows no file from outside of the page's folders, however a link leads there."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from samecurve.errors import UserError
from samecurve_products.page.form.links import check_links
from samecurve_products.page.form.places import Roots, check_places
from samecurve_products.page.form.plan_worker import PlanRefusedError
from samecurve_products.page.form_routes import _data

SECRET = "a text that lies outside of the page's folders\n" * 60
TEXT = "1 2 3 4 5 6 7 8 9\n" * 200
# data.source (or another key) of a config, and the links by name -> what each leads to
FORMS: Mapping[str, tuple[object, Mapping[str, str]]] = {
    "a file in a folder": ("texts", {"texts/b.txt": "{outside}/secret.txt"}),
    "a file in a folder below": ("texts", {"texts/deep/er/b.txt": "{outside}/secret.txt"}),
    "a folder in a folder": ("texts", {"texts/more": "{outside}"}),
    "a pattern of files": ("texts/*.txt", {"texts/b.txt": "{outside}/secret.txt"}),
    "a pattern of folders": ("*/*.txt", {"texts2": "{outside}"}),
    "a pattern with two stars": ("texts/**/*.txt", {"texts/more": "{outside}"}),
    "a pattern of one letter": ("texts/?.txt", {"texts/b.txt": "{outside}/secret.txt"}),
    "a class of letters": ("texts/[ab].txt", {"texts/b.txt": "{outside}/secret.txt"}),
    "a range of files": ("texts/{0..1}.txt", {"texts/1.txt": "{outside}/secret.txt"}),
    "a range of folders": ("f{0..0}/secret.txt", {"f0": "{outside}"}),
    "a link to a link": (
        "texts",
        {"texts/b.txt": "{root}/c.txt", "c.txt": "{outside}/secret.txt"},
    ),
    "a relative link": ("texts", {"texts/b.txt": "../../outside/secret.txt"}),
    "a link to a folder that has one": ("texts", {"texts/in": "{root}/o", "o/x": "{outside}"}),
    "links in a circle, and one out": ("texts", {"texts/a": "{root}", "z.txt": "{outside}"}),
    "one of several sources": (["a.txt", "texts"], {"texts/b.txt": "{outside}/secret.txt"}),
    "a source of a list of mappings": ([{"source": "texts"}], {"texts/more": "{outside}"}),
}


def make_folders(tmp_path: Path, links: Mapping[str, str]) -> tuple[Path, Path]:
    """The page's folder with these links, and a folder outside of it."""
    root, outside = tmp_path / "root", tmp_path / "outside"
    (root / "texts").mkdir(parents=True)
    outside.mkdir()
    (outside / "secret.txt").write_text(SECRET)
    for name in ("a.txt", "texts/a.txt", "texts/0.txt"):
        (root / name).write_text(TEXT)
    for name, target in links.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).symlink_to(target.format(root=root, outside=outside))
    return root, outside


@pytest.mark.parametrize("form", FORMS)
def test_links_out_of_the_folders_are_found(tmp_path: Path, form: str) -> None:
    source, links = FORMS[form]
    root, outside = make_folders(tmp_path, links)
    values = {"data": {"source": source}}
    with pytest.raises(UserError, match=r"is a link to .*outside of the page's") as raised:
        check_links(values, Roots.of([root]), root)
    assert raised.value.where.startswith("data.source")
    assert "samecurve ui . FOLDER" in raised.value.remedy
    check_links(values, Roots.of([root, outside]), root)  # a folder that the user has named


def test_other_links_stay(tmp_path: Path) -> None:
    """Links within the folders, hidden ones, and links that the config does not read."""
    links = {"texts/b.txt": "{root}/a.txt", "texts/.git": "{outside}", "x": "{outside}"}
    root, _ = make_folders(tmp_path, links)
    (root / "texts" / "more").symlink_to(root / "texts")
    sources = ("texts", "texts/*", "a.txt", "s3://x/y", "standard library", "~nobody/x", "a\0b")
    for source in sources:
        check_links({"data": {"source": source, "prompts": ["x"]}}, Roots.of([root]), root)
    with pytest.raises(UserError, match=r"model\.path"):
        check_links({"model": {"path": "x"}}, Roots.of([root]), root)


def test_a_folder_that_cannot_be_listed_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so are links in a circle; links beside them are still found."""
    root, outside = make_folders(tmp_path, {"texts/a": "b", "texts/b": "a"})
    (root / "texts" / "closed").mkdir()
    listed = os.scandir

    def scandir(folder: Path) -> object:  # root, who may run the tests, can list any folder
        if folder.name == "closed":
            raise PermissionError(13, "Permission denied", str(folder))
        return listed(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    values = {"data": {"source": "texts"}}
    check_links(values, Roots.of([root]), root)
    (root / "texts" / "z").symlink_to(outside)
    with pytest.raises(UserError, match="texts/z is a link"):
        check_links(values, Roots.of([root]), root)


def test_a_caption_may_begin_with_a_slash(tmp_path: Path) -> None:
    """The words of a folder in a list are no paths; its source is one."""
    folder = {"source": "pics", "caption": "/bird", "trigger": "/sks"}
    assert check_places({"data": {"source": [folder]}}, Roots.of([tmp_path]), tmp_path) == []
    values = {"data": {"source": [{**folder, "source": "/elsewhere"}]}}
    (error,) = check_places(values, Roots.of([tmp_path]), tmp_path)
    assert error.where == "data.source.source"


class _Desk:
    """Answers as the plan worker does for a config that it has checked."""

    def __init__(self, root: Path, config: Mapping[str, Any]) -> None:
        self.roots = [root]
        self._answer = {"yaml": json.dumps(config), "home": str(root), "name": "x"}

    def ask(self, _verb: str, _request: object) -> Mapping[str, Any]:
        return self._answer


def shown(root: Path, config: Mapping[str, Any]) -> str:
    """What the page's Data shows of a config. PlanRefusedError: it can't be shown."""
    return json.dumps(_data(_Desk(root, config), {}))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["a file in a folder", "a pattern of folders"])
def test_data_shows_no_text_through_a_link(tmp_path: Path, form: str) -> None:
    source, links = FORMS[form]
    root, _ = make_folders(tmp_path, links)
    config = {"task": "language", "model": {"max_seq_len": 64}, "batch": {"samples": 4}}
    with pytest.raises(PlanRefusedError) as raised:
        shown(root, {**config, "data": {"source": source}})
    (error,) = raised.value.errors
    assert error["key"] == "data.source"
    assert "outside of the page's folders" in error["cause"]


def test_data_shows_no_picture_through_a_link(tmp_path: Path) -> None:
    root, outside = make_folders(tmp_path, {})
    for place in (root / "pics" / "a", root / "pics" / "b", outside):
        place.mkdir(parents=True, exist_ok=True)
        for number in range(8):
            Image.new("RGB", (8, 8)).save(place / f"{number}.png")
    config = {"task": "vision", "batch": {"samples": 4}, "data": {"source": "pics"}}
    (root / "pics" / "c").symlink_to(outside)
    with pytest.raises(PlanRefusedError) as raised:
        shown(root, config)
    assert raised.value.errors[0]["key"] == "data.source"
