"""Losses as strangers write them, in corners of Python and torch: each gives the curve of one
device on several, or is refused with the cause.
"""

from pathlib import Path

import pytest
from plain_loops import OWN, opened, plain
from stranger_runs import PLAIN, SGD, STEPS, run

from worlds import Pool

SHORT = {  # in make test
    "modules.PoppedLabel",
    "modules.CheckpointDropout",
    "training.Unfreezes",
    "places.Codebook",
    "keeping.SeenSamples",
    "keeping.DefaultArgument",
    "modules.GradientNormalised",
    "modules.LateSpectralNorm",
    "modules.ViewKept",
    "modules.BufferOnceLow",
    "modules.WeightAsNumpy",
    "modules.PackedBase",
    "modules.AdaptedBase",
    "training.OptimizerSkips",
}
SAME = (
    "keeping.LruCache",
    "keeping.LogFile",
    "keeping.RankFromGroup",
    "keeping.WorldMean",
    "keeping.SetOrder",
    "keeping.StepSmoothing",
    "keeping.WritesIntoItsRows",
    "modules.BufferOfALaterStep",
    "modules.WeightAsNumpy",
    "modules.PackedBase",
    "modules.AdaptedBase",
    "modules.RowGradientClip",
    "modules.MaskedGradient",
    "modules.Parametrized",
    "modules.WeightNorm",
    "modules.LateSpectralNorm",
    "modules.Pruned",
    "modules.CheckpointDropout",
    "modules.InPlaceInput",
    "modules.PoppedLabel",
    "modules.CustomOp",
    "modules.Adversarial",
    "modules.EvalTarget",
    "modules.SeededNoise",
    "training.OptimizerSkips",
    "training.RateInLoss",
    "training.ShuffledColumns",
    "training.DepthByRandom",
    "modules.RareClusters",
    "training.Unfreezes",
    "training.LateTeacher",
    "training.FunctionalInner",
    "places.MaxNorm",
    "places.WeightClipping",
    "places.TargetNetwork",
    "places.Pruning",
    "places.Curriculum",
    "places.MemoryBank",
    "places.Codebook",
    "places.Detector",
    "places.Dice",
)
AS_THE_AUTHORS = (  # whose losses draw no random numbers: those follow the samples here
    "keeping.LruCache",
    "keeping.WorldMean",
    "keeping.StepSmoothing",
    "modules.Parametrized",
    "modules.WeightNorm",
    "modules.Pruned",
    "modules.InPlaceInput",
    "modules.PoppedLabel",
    "modules.CustomOp",
    "modules.Adversarial",
    "training.ShuffledColumns",
    "training.Unfreezes",
    "training.LateTeacher",
    "training.FunctionalInner",
    "places.MaxNorm",
    "places.TargetNetwork",
    "places.Pruning",
    "places.MemoryBank",
    "places.Codebook",
    "places.Detector",
)
NOT_HERE = {  # what a layout can't have, and says so
    ("modules.MaskedGradient", "fsdp"): "0.weight has a hook, which would not be called",
    ("training.Unfreezes", "fsdp"): "the loss thaws the weight 0.",
    ("modules.BufferOfALaterStep", "fsdp"): "the loss reads 0.weight outside of its block's",
    ("training.LateTeacher", "fsdp"): "the loss reads 0.weight outside of its block's forward()",
    ("training.FunctionalInner", "fsdp"): "another tensor stands in the place of 0.weight",
    ("training.OptimizerSkips", "fsdp-exact"): "would update parts of arrays",
    ("places.MemoryBank", "fsdp-exact"): "would update parts of arrays",
    ("places.Codebook", "fsdp-exact"): "would update parts of arrays",
    ("training.RateInLoss", "fsdp-exact"): "would update parts of arrays",
}
REFUSED = {  # before the first step of ddp on two devices
    "keeping.ClassVariable": "class variable Seen.passes is changed in each forward pass",
    "keeping.ModuleGlobal": "global variable keeping.SCALE",
    "keeping.LastLossFile": "a clock, a file, a cache",
    "keeping.WallClock": "a clock, a file, a cache",
    "keeping.BackgroundThread": "the loss gives the sum",
    "keeping.DefaultArgument": "default argument DefaultArgument.scaled.last",
    "keeping.HardQueue": "global variable keeping.HARD",
    "keeping.OwnNumpyGenerator": "self.rng.beta draws numbers that follow no sample",
    "keeping.SeenSamples": "attribute task.seen is changed in each forward pass",
    "modules.RunningNorm": "attribute model.deviation is changed in each forward pass",
    "modules.CheckpointCount": "attribute model.calls is changed in each forward pass",
    "modules.HiddenBuffer": "changes buffer mean by the samples that it sees",
    "modules.GradientNormalised": "a hook of a tensor takes part in the backward pass",
    "modules.ClampedGradient": "a hook of 0.weight takes part in the backward pass",
    "modules.ClampedAfterAccumulation": "a hook of 0.weight is called after each backward pass",
    "modules.MixingOp": "strangers.centred.default makes the numbers of a sample depend on",
    "training.NumpyShuffle": "Tensor.__getitem__ makes the numbers of a sample depend on",
    "training.RareWeightNoise": "the loss changes the weight 0.weight",
    "training.EverySeventh": "the loss at step 5",
    "training.SharpnessAware": "the loss gives the sum",
}
REFUSED_LATER = {  # by layout, with what is said
    "modules.BufferOnceLow": (
        "parts",
        "changes buffer seen in this step, and did not in",
    ),
    "training.ForgetsMoments": ("ddp", "the loss changes the optimizer's exp_avg of 0.weight"),
    "training.OptimizerByNorm": ("fsdp", "depends on optimizer CautiousSGD.largest, which"),
    "training.NormalisedUpdates": ("fsdp", "elementwise = True says that it does not"),
}


def cases(names: tuple[str, ...]) -> list[object]:
    marks = [pytest.mark.long]  # minutes in all; make test has some of them
    return [pytest.param(name, marks=[] if name in SHORT else marks) for name in names]


@pytest.mark.parametrize("case", cases(SAME))
def test_a_harmless_loss_gives_one_curve(case: str, pool: Pool, tmp_path: Path) -> None:
    expected = run(pool, tmp_path, case, "one")
    assert not expected.error
    for layout in ("parts", "ddp", "fsdp"):
        outcome = run(pool, tmp_path, case, layout)
        if said := NOT_HERE.get((case, layout)):
            assert said in outcome.error
            assert not outcome.losses or case == "training.FunctionalInner"  # before the first step
        else:
            assert not outcome.error
            assert outcome.losses == pytest.approx(expected.losses, rel=1e-12)


@pytest.mark.long
@pytest.mark.parametrize("case", SAME)
def test_a_harmless_loss_gives_the_same_bits(case: str, pool: Pool, tmp_path: Path) -> None:
    expected = run(pool, tmp_path, case, "one", exact=True)
    assert not expected.error
    for layout in ("ddp", "fsdp"):
        outcome = run(pool, tmp_path, case, layout, exact=True)
        said = NOT_HERE.get((case, f"{layout}-exact")) or NOT_HERE.get((case, layout))
        if said:
            assert said in outcome.error
        else:
            assert not outcome.error
            assert outcome.losses == expected.losses


@pytest.mark.parametrize("case", cases(AS_THE_AUTHORS))
def test_the_curve_is_that_of_the_authors_loop(case: str, pool: Pool, tmp_path: Path) -> None:
    """On two ranks, to the last digits of a loop of torch alone."""
    expected = OWN[case]() if case in OWN else plain(case)
    has_own = hasattr(opened(case), "optimizer")
    sections = PLAIN if has_own else {**PLAIN, "optimizer": SGD}
    outcome = run(pool, tmp_path, case, "ddp", sections=sections)
    assert not outcome.error
    losses = [outcome.losses[f"step {step}"] for step in range(1, STEPS + 1)]
    assert losses == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("case", cases(tuple(REFUSED)))
def test_a_loss_that_follows_the_devices_is_refused(case: str, pool: Pool, tmp_path: Path) -> None:
    outcome = run(pool, tmp_path, case, "ddp")
    assert REFUSED[case] in outcome.error
    assert "remedy: " in outcome.error
    assert outcome.where.partition(":")[0].endswith((f"{case.partition('.')[0]}.py", "common.py"))
    assert not outcome.losses


@pytest.mark.parametrize("case", cases(("modules.ViewKept", "modules.DetachedViewKept")))
def test_a_view_of_a_weight_that_lies_elsewhere_is_refused(
    case: str, pool: Pool, tmp_path: Path
) -> None:
    """In f64 the weight has other memory on one device, too: model() makes it in f32."""
    train = {"steps": STEPS, "precision": "f32", "eval_every": 6, "save_every": 6, "exact": False}
    expected, as_ddp, as_fsdp = (
        run(pool, tmp_path, case, layout, sections={"train": train})
        for layout in ("one", "ddp", "fsdp")
    )
    assert not as_ddp.error
    assert as_ddp.losses == pytest.approx(expected.losses, rel=1e-5)
    wide = run(pool, tmp_path / "f64", case, "one")
    for outcome in (as_fsdp, wide):
        assert "model.flat.0 is a view of the weight" in outcome.error
        assert "make the view where it is used" in outcome.error
        assert outcome.where.partition(":")[0].endswith("modules.py")
        assert not outcome.losses


@pytest.mark.parametrize("case", cases(tuple(REFUSED_LATER)))
def test_what_shows_later_ends_the_run(case: str, pool: Pool, tmp_path: Path) -> None:
    layout, said = REFUSED_LATER[case]
    outcome = run(pool, tmp_path, case, layout)
    assert said in outcome.error
    assert "evaluated 12" not in outcome.losses


@pytest.mark.parametrize(
    "case",
    cases(("training.OptimizerSkips", "training.OptimizerByNorm", "modules.BufferOfALaterStep")),
)
def test_a_resumed_run_is_as_one_that_never_stopped(case: str, pool: Pool, tmp_path: Path) -> None:
    """What an optimizer keeps in attributes of its own, and a buffer that has come to be."""
    expected = run(pool, tmp_path, case, "one")
    run(pool, tmp_path / "stopped", case, "one", stop_at=5)
    resumed = run(pool, tmp_path / "stopped", case, "one", resume=5)
    assert not resumed.error
    assert resumed.losses == expected.losses


def test_buffers_are_those_of_one_rank_before_a_save_compares_them(
    pool: Pool, tmp_path: Path
) -> None:
    """With train.allow_coupled, and without an evaluation just before."""
    train = {"steps": 4, "precision": "f64", "save_every": 3, "exact": False}
    outcome = run(
        pool,
        tmp_path,
        "modules.CoupledCentre",
        "ddp",
        sections={"train": {**train, "eval_every": 100, "allow_coupled": True}},
    )
    assert not outcome.error
