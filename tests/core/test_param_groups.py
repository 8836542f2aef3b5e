"""What optimizer.groups says of each name, and which rules are refused, where they stand."""

from typing import Any

import pytest

from samecurve.core.config import flatten
from samecurve.core.config.document import Document, dump_document, parse_document
from samecurve.core.config.loading import load_document
from samecurve.core.config.param_groups import ParamRule
from samecurve.core.config.sections import Config
from samecurve.errors import SamecurveError, UserError
from samecurve.tasks import Tasks

NAMES = {"embed.weight": 100, "encoder.0.weight": 40, "encoder.0.bias": 4, "head.weight": 20}


def config_of(*groups: Any) -> Config:
    return load_document(
        parse_document(
            dump_document(
                {
                    "data": {"source": "x"},
                    "batch": {"samples": 1},
                    "optimizer": {"weight_decay": 0.1, "groups": list(groups)},
                }
            ),
            "run.yaml",
        ),
        Tasks(),
    ).config


def test_the_first_match_rules() -> None:
    rules = config_of(
        {"match": "*.bias", "weight_decay": 0.5},
        {"match": "embed*", "lr_scale": 0.1},
        {"match": "encoder.*", "freeze": True},
    ).optimizer.rules
    assert rules.rule_for("encoder.0.bias", matrix=False) == ParamRule(1.0, 0.5, False)
    assert rules.rule_for("encoder.0.weight", matrix=True) == ParamRule(1.0, 0.1, True)
    assert rules.rule_for("embed.weight", matrix=True) == ParamRule(0.1, 0.1, False)
    assert rules.rule_for("head.weight", matrix=True) == ParamRule(1.0, 0.1, False)
    assert rules.rule_for("norm", matrix=False) == ParamRule(1.0, 0.0, False)
    assert rules.describe(NAMES, fixed=["head.weight"]) == {
        "trainable": 104,
        "groups": (
            "*.bias: weight decay 0.5 (1 parameter, 4 scalars: encoder.0.bias)",
            "embed*: lr x 0.1 (1 parameter, 100 scalars: embed.weight)",
            "encoder.*: frozen (1 parameter, 40 scalars: encoder.0.weight)",
        ),
        "frozen": ("encoder.0.weight", "head.weight"),
    }


def test_a_config_keeps_its_groups() -> None:
    """Through its file and a checkpoint's manifest."""
    config = config_of({"match": "embed*", "lr_scale": 0.1}, {"match": "head*", "freeze": True})
    assert (
        load_document(Document(config.model_dump(mode="json")), Tasks()).config.optimizer
        == config.optimizer
    )
    assert flatten(config)["optimizer.groups"] == [
        {"match": "embed*", "lr_scale": 0.1},
        {"match": "head*", "freeze": True},
    ]


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([{"match": "head*"}], "run.yaml:8:5: optimizer.groups.0: 'head*' says nothing"),
        (
            [{"match": "head*", "freeze": True, "lr_scale": 2.0}],
            "so lr_scale and weight_decay would do nothing",
        ),
        ([{"match": "head*", "lr_scale": 0.0}], "freeze: true leaves gradients"),
        ([{"match": "head*", "lr_scale": -1.0}], "optimizer.groups.0.lr_scale: should be greater"),
        ([{"macth": "head*"}], "did you mean match?"),
        ("head*", "optimizer.groups: should be a list"),
    ],
)
def test_a_group_that_says_nothing_or_too_much_is_refused(groups: Any, says: str) -> None:
    with pytest.raises(SamecurveError) as refused:
        (
            config_of(*groups)
            if isinstance(groups, list)
            else load_document(
                parse_document(
                    dump_document(
                        {"data": {}, "batch": {"samples": 1}, "optimizer": {"groups": groups}}
                    ),
                    "run.yaml",
                ),
                Tasks(),
            )
        )
    assert says in str(refused.value)


@pytest.mark.parametrize(
    ("groups", "where", "says"),
    [
        (
            [{"match": "embd.*", "lr_scale": 2.0}],
            "optimizer.groups.0.match",
            "names are like embed.weight",
        ),
        (
            [{"match": "e*", "lr_scale": 2.0}, {"match": "encoder.*", "freeze": True}],
            "optimizer.groups.1.match",
            "an earlier group rules encoder.0.weight and 1 more already",
        ),
        ([{"match": "*", "freeze": True}], "optimizer.groups", "nothing is left to train"),
        (
            [{"match": "e*", "freeze": True}],
            "optimizer.groups",
            "what the groups leave is frozen by the model itself",
        ),
    ],
)
def test_rules_that_rule_nothing_are_refused(groups: Any, where: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        config_of(*groups).optimizer.rules.describe(NAMES, fixed=["head.weight"])
    assert refused.value.where == where
    assert says in str(refused.value)


def test_an_optional_group_is_left_out_where_no_name_matches() -> None:
    """A config that serves several models: the plan says what was left out. Others are refused."""
    rules = config_of(
        {"match": "blocks.1.*", "lr_scale": 0.5, "optional": True},
        {"match": "encoder.*", "lr_scale": 0.1, "optional": True},
        {"match": "cls_token", "lr_scale": 0.2, "optional": True},
    ).optimizer.rules
    described = rules.describe(NAMES)["groups"]
    assert [text.partition(":")[0] for text in described] == ["encoder.*", "blocks.1.* and 1 more"]
    assert described[1].endswith("left out (optional), no parameter has such a name")
    with pytest.raises(UserError, match="matches none of the 4") as refused:
        config_of({"match": "blocks.1.*", "lr_scale": 0.5}).optimizer.rules.describe(NAMES)
    assert "optional: true" in refused.value.remedy
    shadowed = config_of(
        {"match": "encoder.*", "lr_scale": 0.5},
        {"match": "encoder.0.*", "lr_scale": 0.1, "optional": True},
    )
    with pytest.raises(UserError, match="rules no parameter: an earlier group"):
        shadowed.optimizer.rules.describe(NAMES)
