"""The features in their order: what only some runs have, each in one folder.

The kernel knows this list, and no name in it. `features/list.json`, which `make docs` writes, has
the config's keys and the plan's key of each feature of ours. So a run imports the features that it
has, and no others. A folder that the list lacks is found all the same, and so is what an installed
package brings (entry points of the group `samecurve.features`). The optimizers in
`features/optimizers/` are listed in the same way.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from samecurve.errors import UserError

_OURS = "samecurve.features."
_OPTIMIZERS = "optimizers"  # the folder of the config's optimizers beside adamw and sgd
_HOME = Path(__file__).parents[1] / "features"


@dataclass(frozen=True, kw_only=True, eq=False)
class ListedFeature:
    """What the kernel knows of a feature before it is imported."""

    name: str
    place: str  # the package
    order: int = 1000
    section: str = "train"  # of the config
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of its keys in that section
    plan_key: str  # in plan.json; "every.name" is a key within `every`
    plan_off: Any = None  # the value of that key in a plan that has no such feature
    is_in_each_plan: bool = False  # whether such plans have the key
    # reasons that the banner shows -> the words before each
    banner: Mapping[str, str] = field(default_factory=dict)
    table_only: Sequence[str] = ()  # reasons that only the table of `samecurve plan` shows
    changes_results: bool = True
    fixes_devices: bool = False  # whether its values are of certain devices
    sees_whole_batch: bool = False  # whether the loss of a sample looks at the others of its step
    # why each microbatch goes forward twice, where a step has several accumulation steps
    goes_twice: str = ""
    # with other values of its keys a device may hold less: its place among such; 0: not so
    remedy_order: int = 0
    brought_by: Sequence[str] = ()  # precisions, or findings about the task's code
    # what the feature must know of a task and its model: key -> if it is not so
    facts: Mapping[str, Any] = field(default_factory=dict)
    # of a task's class, for the feature: name -> how it is written, and what it is
    members: Mapping[str, str] = field(default_factory=dict)

    @property
    def keys(self) -> list[str]:
        """The feature's keys of the config, dotted."""
        return [f"{self.section}.{key}" for key in self.defaults]

    @property
    def off(self) -> dict[str, Any]:
        """The default of each of its keys, dotted."""
        return dict(zip(self.keys, self.defaults.values(), strict=True))

    @property
    def flags_off(self) -> str:
        """What the user types to have the defaults of its keys."""
        values = {key: json.dumps(value).removesuffix(".0") for key, value in self.off.items()}
        return " ".join(f"--set {key}={value}" for key, value in values.items())

    def is_named(self, values: Mapping[str, Any]) -> bool:
        """Whether a value of the section is not the feature's default.

        values: of the section, by key, as a config file has them
        """
        return any(
            type(values[key]) is not type(default) or values[key] != default
            for key, default in self.defaults.items()
            if key in values
        )

    def load(self) -> Any:
        """The Feature (core/feature.py), which is imported."""
        return import_module(self.place).FEATURE


@cache
def listed() -> tuple[ListedFeature, ...]:
    """The features of this package."""
    known = _with_tuples(json.loads((_HOME / "list.json").read_text()))
    rows, keys = [], {key.name for key in fields(ListedFeature)}
    for name in _folders():
        if name in known and known[name].keys() <= keys:  # else the list is older: `make docs`
            rows.append(ListedFeature(name=name, place=_OURS + name, **known[name]))
        else:
            rows.append(_row_of(_OURS + name))
    return _in_order(rows)


def _with_tuples(value: Any) -> Any:
    """A value of JSON with tuples, as configs and facts have them, in the place of lists."""
    if isinstance(value, dict):
        return {key: _with_tuples(item) for key, item in value.items()}
    return tuple(value) if isinstance(value, list) else value


def _folders() -> list[str]:
    return [
        folder.name
        for folder in _HOME.iterdir()
        if (folder / "__init__.py").is_file() and folder.name != _OPTIMIZERS
    ]


def _in_order(rows: Iterable[ListedFeature]) -> tuple[ListedFeature, ...]:
    return tuple(sorted(rows, key=lambda row: (row.order, row.name)))


@cache
def listed_and_installed() -> tuple[ListedFeature, ...]:
    """The features of this package and of others, which take some milliseconds to find.

    UserError: another package's feature can't be loaded, or has the name of one of ours.
    """
    from samecurve.core.entry_points import installed, load

    ours = listed()
    points = installed("features").values()
    others = [load(point, "feature", lambda point: _row_of(point.value)) for point in points]
    names = {row.name for row in ours}
    for row in others:
        if row.name in names:
            raise UserError(
                f"two features are called {row.name}; one of them is {row.place}",
                "uninstall one of the packages that bring them",
            )
        names.add(row.name)
    return _in_order([*ours, *others])


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


def wanted(config: Any, brought: Iterable[str]) -> list[ListedFeature]:
    """The features that a config names or a task brings, in their order.

    brought: names of those that the task brings
    """
    return rows_of({*brought, *(row.name for row in config.named_features)})


def sees_whole_batch(names: Iterable[str]) -> bool:
    """Whether the loss of a sample looks at the others of its step. names: of a run's features"""
    return any(row.sees_whole_batch for row in rows_of(names))


def saving_memory(rows: Iterable[ListedFeature]) -> list[ListedFeature]:
    """Those with which a device may hold less, the one that costs least first."""
    return sorted((row for row in rows if row.remedy_order), key=lambda row: row.remedy_order)


def why_twice(names: Iterable[str]) -> str:
    """Why each microbatch goes forward twice, where a step has several accumulation steps; '': it
    does not. names: of a run's features
    """
    return next((row.goes_twice for row in rows_of(names) if row.goes_twice), "")


@cache
def listed_optimizers() -> tuple[str, ...]:
    """The names of the config's optimizers beside adamw and sgd, in their order."""
    return tuple(sorted(file.parent.name for file in _HOME.glob(f"{_OPTIMIZERS}/*/__init__.py")))


def spec_of(optimizer: str) -> Any:
    """The OptimizerSpec (core/optimizer_spec.py), which is imported. None: adamw or sgd."""
    if optimizer not in listed_optimizers():
        return None
    return import_module(f"{_OURS}{_OPTIMIZERS}.{optimizer}").SPEC


def brought_by(what: str) -> list[str]:
    """The names of the features that a precision, or a finding about the task's code, brings."""
    return [row.name for row in listed() if what in row.brought_by]


def fact_keys() -> set[str]:
    """The keys of the facts that features ask for."""
    return {key for row in listed() for key in row.facts}


def feature_members() -> dict[str, str]:
    """What a task's class may have for features: name -> how it is written, and what it is."""
    return {name: words for row in listed() for name, words in row.members.items()}


def split_facts(facts: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """The kernel's facts, and those of each feature that a task brings, by the feature's name.

    facts: all of them, by key
    """
    rest, by_feature = dict(facts), {}
    for row in listed():
        own = {key: rest.pop(key) for key in row.facts if key in rest}
        if any(value != row.facts[key] for key, value in own.items()):
            by_feature[row.name] = own
    return rest, by_feature


def hooks_of(features: Mapping[str, Any], where: str) -> Iterator[tuple[str, Any, Any]]:
    """The hooks of a run's features: the name, the class, and what the plan has of the feature.

    features: as a plan has them
    """
    for row in rows_of(features) if features else ():
        hooks = row.load().hooks_class(where)
        if hooks is not None:
            yield row.name, hooks, features[row.name]


def as_json() -> dict[str, dict[str, Any]]:
    """The content of `features/list.json`: of each feature what is not the default."""
    rows = _in_order(_row_of(_OURS + name) for name in _folders())
    return {row.name: _beyond_defaults(row) for row in rows}


def _beyond_defaults(row: ListedFeature) -> dict[str, Any]:
    values = asdict(row)
    return {
        known.name: values[known.name]
        for known in fields(row)
        if known.name not in {"name", "place"}
        and values[known.name]
        != (known.default if known.default_factory is MISSING else known.default_factory())
    }


def _row_of(place: str) -> ListedFeature:
    """What the kernel knows of the feature that a package has as FEATURE."""
    feature = import_module(place).FEATURE
    keys = feature.fields.model_fields if feature.fields else {}
    told: dict[str, Any] = {
        key.name: getattr(feature, key.name, None) for key in fields(ListedFeature)
    }
    computed: dict[str, Any] = {
        "name": place.rpartition(".")[2],
        "place": place,
        "defaults": {key: info.get_default() for key, info in keys.items()},
        "plan_key": feature.plan_key or place.rpartition(".")[2],
        "facts": {fact.name: fact.default for fact in fields(feature.facts)},
    }
    return ListedFeature(**{**told, **computed})
