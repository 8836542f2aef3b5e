"""Each preset of OneTrainer trains here, or says why not and what to do."""

import copy
from collections import Counter

import pytest
from diffusion_configs import loaded, read_values, refused
from onetrainer_presets import (
    ENCODERS,
    MASKS,
    METHOD,
    OPTIMIZER,
    PLACE,
    PRESETS,
    SOME_TIMES,
    TIMES,
    UNSERVED,
    WEIGHTS,
    Preset,
    values_of_preset,
)

_WORDS = {  # of an error, and the reason that it gives
    "is of a kind": UNSERVED,
    "is not computed here": OPTIMIZER,
    "text encoders stay": ENCODERS,
    "training_method": METHOD,
    "is a distribution": TIMES,
    "leaves out some times": SOME_TIMES,
    "weighs times": WEIGHTS,
    "the area that counts": MASKS,
    "in a place of its own": PLACE,
}


def _reason(error: str) -> str:
    (reason,) = {reason for words, reason in _WORDS.items() if words in error}
    return reason


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.name)
def test_a_preset_trains_or_says_why_not(preset: Preset) -> None:
    converted = read_values(values_of_preset(preset))
    if not preset.reasons:
        config = loaded(converted).config
        assert config.task == "diffusion"
        assert config.train.steps in {"100ep", "40ep"}
        # there gradient checkpointing is on by itself
        assert vars(config.train)["recompute"] == "block"
        return
    errors = refused(converted)
    assert {_reason(error) for error in errors} == set(preset.reasons)
    assert all("remedy: " in error for error in errors)


def test_how_many_presets_train() -> None:
    assert len({preset.name for preset in PRESETS}) == len(PRESETS) == 60
    reasons = Counter(preset.reasons[:1] for preset in PRESETS)
    assert reasons == {
        (): 9,
        (UNSERVED,): 37,
        (ENCODERS,): 5,
        (METHOD,): 3,
        (PLACE,): 2,
        (OPTIMIZER,): 4,
    }


@pytest.mark.parametrize(
    "preset", [preset for preset in PRESETS if preset.reasons == (ENCODERS,)], ids=lambda p: p.name
)
def test_the_remedy_for_text_encoders_is_all_that_lacks(preset: Preset) -> None:
    values = copy.deepcopy(values_of_preset(preset))
    values.setdefault("text_encoder", {})["train"] = False
    loaded(read_values(values))


@pytest.mark.parametrize(
    "preset", [preset for preset in PRESETS if preset.reasons == (OPTIMIZER,)], ids=lambda p: p.name
)
def test_a_flag_names_another_optimizer(preset: Preset) -> None:
    loaded(read_values(values_of_preset(preset)), optimizer__name="adamw8bit")
