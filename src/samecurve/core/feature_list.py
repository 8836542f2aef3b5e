"""The features in their order: what only some runs have, each in one folder.

The kernel knows this list, and no name in it. `features/list.json`, which `make docs` writes, has
the config's keys and the plan's key of each feature of ours. So a run imports the features that it
has, and no others. A folder that the list lacks is found all the same, and so is what an installed
package brings (entry points of the group `samecurve.features`).
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any

from samecurve.errors import UserError

if TYPE_CHECKING:  # imported by the features of a run alone
    from samecurve.core.config.sections import Config
    from samecurve.core.feature import Feature, Where

ENTRY_POINTS = "samecurve.features"  # the group under which an installed package names a feature
_HOME = Path(__file__).parents[1] / "features"


@dataclass(frozen=True, kw_only=True, eq=False)
class ListedFeature:
    """What the kernel knows of a feature before it is imported."""

    name: str
    place: str  # the package
    order: int
    section: str  # of the config
    defaults: Mapping[str, Any]  # of its keys in that section
    plan_key: str  # in plan.json; "every.name" is a key within `every`
    plan_off: Any  # the value of that key in a plan that has no such feature
    is_in_each_plan: bool  # whether such plans have the key
    said: Mapping[str, str]  # reasons that the banner shows -> the words before each
    tabled: tuple[str, ...]  # reasons that only the table of `samecurve plan` shows
    changes_results: bool

    @property
    def keys(self) -> list[str]:
        """The feature's keys of the config, dotted."""
        return [f"{self.section}.{key}" for key in self.defaults]

    def is_named(self, values: Mapping[str, Any]) -> bool:
        """Whether a value of the section is not the feature's default.

        values: of the section, by key, as a config file has them
        """
        return any(
            type(values[key]) is not type(default) or values[key] != default
            for key, default in self.defaults.items()
            if key in values
        )

    def load(self) -> "Feature[Any, Any]":
        feature: Feature[Any, Any] = import_module(self.place).FEATURE
        return feature


@cache
def listed() -> tuple[ListedFeature, ...]:
    """The features of this package."""
    rows = json.loads((_HOME / "list.json").read_text())
    known = [ListedFeature(**{**row, "tabled": tuple(row["tabled"])}) for row in rows]
    names = {row.name for row in known}
    folders = [folder.name for folder in _HOME.iterdir() if (folder / "__init__.py").is_file()]
    found = [row for row in known if row.name in folders]
    found += [_row_of(f"samecurve.features.{name}") for name in folders if name not in names]
    return tuple(sorted(found, key=lambda row: (row.order, row.name)))


@cache
def listed_and_installed() -> tuple[ListedFeature, ...]:
    """The features of this package and of others, which take some milliseconds to find.

    UserError: another package's feature can't be loaded, or has the name of one of ours.
    """
    ours = listed()
    others = [_installed_row(point) for point in entry_points(group=ENTRY_POINTS)]
    names = {row.name for row in ours}
    for row in others:
        if row.name in names:
            raise UserError(
                f"two features are called {row.name}; one of them is {row.place}",
                "uninstall one of the packages that bring them",
            )
        names.add(row.name)
    return tuple(sorted([*ours, *others], key=lambda row: (row.order, row.name)))


def listed_with(names: Iterable[str]) -> tuple[ListedFeature, ...]:
    """The features of this package; those of others too where one of these names is not ours."""
    rows = listed()
    return rows if set(names) <= {row.name for row in rows} else listed_and_installed()


def rows_of(names: Iterable[str]) -> list[ListedFeature]:
    """The features of these names, in their order. ValueError: there is no such feature."""
    wanted = set(names)
    found = [row for row in listed_with(wanted) if row.name in wanted]
    if len(found) < len(wanted):
        raise ValueError(f"there is no feature {min(wanted - {row.name for row in found})}")
    return found


def wanted(config: "Config", brought: Iterable[str]) -> list[ListedFeature]:
    """The features that a config names or a task brings, in their order.

    brought: names of those that the task brings
    """
    return rows_of({*brought, *(row.name for row in config.named_features)})


def hooks_of(features: Mapping[str, Any], where: "Where") -> Iterator[tuple[str, Any, Any]]:
    """The hooks of a run's features: the name, the class, and what the plan has of the feature.

    features: as a plan has them
    """
    for row in rows_of(features) if features else ():
        hooks = row.load().hooks_class(where)
        if hooks is not None:
            yield row.name, hooks, features[row.name]


def as_json() -> list[dict[str, Any]]:
    """The content of `features/list.json`."""
    folders = sorted(
        folder.name for folder in _HOME.iterdir() if (folder / "__init__.py").is_file()
    )
    rows = [_row_of(f"samecurve.features.{name}") for name in folders]
    return [asdict(row) for row in sorted(rows, key=lambda row: (row.order, row.name))]


def _installed_row(point: EntryPoint) -> ListedFeature:
    try:
        return _row_of(point.value)
    except Exception as error:  # whatever that package's code raises
        package = point.dist.name if point.dist else point.value
        raise UserError(
            f"feature {point.name} of the installed package {package} can't be loaded:"
            f" {type(error).__name__}: {error}",
            f"install {package} again, or uninstall it",
        ) from error


def _row_of(place: str) -> ListedFeature:
    """What the kernel knows of the feature that a package has as FEATURE."""
    feature: Feature[Any, Any] = import_module(place).FEATURE
    fields = feature.fields.model_fields if feature.fields else {}
    return ListedFeature(
        name=place.rpartition(".")[2],
        place=place,
        order=feature.order,
        section=feature.section,
        defaults={key: field.get_default() for key, field in fields.items()},
        plan_key=feature.plan_key or place.rpartition(".")[2],
        plan_off=feature.plan_off,
        is_in_each_plan=feature.is_in_each_plan,
        said=feature.said,
        tabled=feature.tabled,
        changes_results=feature.changes_results,
    )
