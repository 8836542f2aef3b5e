"""OneTrainer's concepts, its folders of pictures, and its samples, the prompts that are shown.

Both are lists in the file, or in files of their own that it names.
"""

from collections.abc import Sequence

from samecurve_products.convert.foreign_config import ForeignConfig
from samecurve_products.convert.picture_folders import (
    NO_FOLDER,
    SOURCE,
    UNLIKE,
    Folder,
    Lacking,
    Setting,
    leave_out,
    leave_out_whole,
    names_of,
    number_folders,
    read_repeats,
    read_settings,
    refuse_lacking,
    write_sources,
)
from samecurve_products.convert.prompts import Prompt, prompt_of, write_prompts

_CONCEPT_FILE, _SAMPLE_FILE = "training_concepts/concepts.json", "training_samples/samples.json"
_CAPTIONS = {"sample": "empty", "filename": "name"}
_SETTINGS = (
    Setting(
        "image.enable_crop_jitter",
        "data.crop",
        True,
        lambda on: "random" if on else "center",
        said="a crop at a random place",
    ),
    Setting(
        "text.prompt_source",
        "data.captions.missing",
        "sample",
        lambda word: _CAPTIONS.get(str(word), word),
        why="of a picture without a .txt file",
        said="a picture without a .txt file has an empty caption",
    ),
    Setting("text.enable_tag_shuffling", "data.captions.shuffle", False),
    Setting("text.tag_delimiter", "data.captions.separator", ","),
)
_COLOURS = ("brightness", "contrast", "saturation", "hue")
_LACKING = (
    *(
        Lacking(f"image.enable_{how}_{what}", "changes pictures in a way that is not here")
        for what in ("rotate", *_COLOURS)
        for how in ("random", "fixed")
    ),
    Lacking("image.enable_random_circular_mask_shrink", "changes masks"),
    Lacking("image.enable_random_mask_rotate_crop", "changes masks"),
    Lacking(
        "image.enable_resolution_override",
        "gives this folder a resolution of its own; here all folders have one",
        "resolution in the file, or a run for each",
    ),
    Lacking(
        "text.tag_dropout_enable",
        "drops parts of captions",
        "data.captions.dropout drops whole captions",
    ),
    Lacking("text.caps_randomize_enable", "writes captions in other capitals"),
)
_OF_SWITCHES = " ".join(
    [
        "image.random_rotate_max_angle image.resolution_override",
        *(f"image.random_{what}_max_strength" for what in _COLOURS),
        *(f"text.tag_dropout_{what}" for what in ("mode", "probability", "special_tags")),
        "text.tag_dropout_special_tags_mode text.tag_dropout_special_tags_regex",
        *(f"text.caps_randomize_{what}" for what in ("mode", "probability", "lowercase")),
    ]
)
_UNREAD = (
    "__version image.__version text.__version name seed enabled balancing_strategy loss_weight"
    " concept_stats text.prompt_path validation_concept"
)


def concepts(foreign: ForeignConfig) -> None:
    """Read the concepts: those of the file, or of the file that it names."""
    if not foreign.items("concepts") and not _include(foreign, "concepts", "concept_file_name"):
        return
    foreign.ignore("concept_file_name", "the concepts are read")
    folders = []
    for at in foreign.items("concepts"):
        if foreign.value(f"{at}.enabled", True) is False:
            leave_out_whole(foreign, f"{at}.", "of a concept that is switched off")
        elif _is_trained_on(foreign, at):
            folders.append(Folder((f"{at}.",)))
    if not folders:
        foreign.refuse_default("concepts", "none is switched on", "no pictures", NO_FOLDER, SOURCE)
        foreign.keep_refused(SOURCE, "no folder")
    number_folders(folders)
    for folder in folders:
        _read_concept(foreign, folder)
    read_repeats(foreign, folders, "balancing")
    _read_flips(foreign, folders)
    _read_kept_tags(foreign, folders)
    _read_variations(foreign, folders)
    read_settings(foreign, folders, _SETTINGS)
    refuse_lacking(foreign, folders, _LACKING)
    leave_out(foreign, folders, _OF_SWITCHES, "of what is switched off")
    leave_out(foreign, folders, _UNREAD, "of its window, or as here")
    write_sources(foreign, folders)


def _include(foreign: ForeignConfig, key: str, field: str) -> bool:
    """Take in the file that the config names, at `key`. Refused where it is not there."""
    default = _CONCEPT_FILE if key == "concepts" else _SAMPLE_FILE
    name = foreign.value(field, default)
    document = foreign.companions.document(name, key)
    if document is not None and isinstance(document.value.get(key), list):
        foreign.include(document)
        return bool(foreign.items(key))
    if key == "concepts":
        why = "is not there, so its folders of pictures are not known"
        if foreign.value(field) is None:
            foreign.refuse_default(field, name, why, NO_FOLDER, SOURCE)
        else:
            foreign.refuse(field, why, NO_FOLDER, SOURCE)
        foreign.keep_refused(SOURCE, f"folders of {name}")
    return False


def _is_trained_on(foreign: ForeignConfig, at: str) -> bool:
    """Whether the concept is a folder to train on; any other kind is refused."""
    kind = f"{at}.type"
    is_validation = foreign.value(f"{at}.validation_concept") is True
    if foreign.value(kind, "STANDARD") == "STANDARD" and not is_validation:
        foreign.ignore(kind, "a folder to train on")
        return True
    remedy = '"enabled": false leaves the folder out; data.validation keeps a share of all pictures'
    for name in (kind, f"{at}.validation_concept"):
        foreign.refuse(name, "is not a folder to train on, and has no counterpart", remedy, SOURCE)
    leave_out_whole(foreign, f"{at}.", "of a folder that is refused")
    return False


def _read_concept(foreign: ForeignConfig, folder: Folder) -> None:
    """Read what a concept has of its own."""
    path = foreign.value(f"{folder.levels[0]}path")
    folder.read(foreign, "path", "source", path, "")
    weight = foreign.value(f"{folder.levels[0]}loss_weight", 1.0)
    if weight != 1.0:
        why = "a step's sum is divided by the sum of the weights here"
        folder.read(foreign, "loss_weight", "weight", weight, why)
    if foreign.value(f"{folder.levels[0]}balancing_strategy", "REPEATS") != "REPEATS":
        why = "draws a number of pictures in each epoch"
        name = f"{folder.levels[0]}balancing_strategy"
        foreign.refuse(name, why, "REPEATS, and a whole number as balancing", SOURCE)
    if foreign.value(f"{folder.levels[0]}text.prompt_source") == "concept":
        why = "draws a caption from one file for all pictures"
        remedy = "a .txt file beside each picture, or data.captions.trigger"
        foreign.refuse(f"{folder.levels[0]}text.prompt_source", why, remedy, "data.captions")
    _check_subfolders(foreign, folder, path)


def _check_subfolders(foreign: ForeignConfig, folder: Folder, path: object) -> None:
    """Refuse a folder with folders below it that OneTrainer would pass over."""
    name = f"{folder.levels[0]}include_subdirectories"
    if foreign.value(name) is True:
        foreign.ignore(name, "always so")
        return
    found = foreign.companions.names_in(path)
    below = [part for part in found[1] if (found[0] / part).is_dir()] if found else []
    if not below:
        foreign.ignore(name, "folders below it are read too, where there are any")
        return
    why = f"passes over the folders in it ({below[0]}); here they are read too"
    remedy = "move them elsewhere, or include_subdirectories: true"
    if foreign.value(name) is None:
        foreign.refuse_default(name, False, why, remedy, SOURCE)
    else:
        foreign.refuse(name, why, remedy, SOURCE)


def _read_flips(foreign: ForeignConfig, folders: Sequence[Folder]) -> None:
    """Read the mirroring: random, or of each picture."""
    key, chances = "data.flip", []
    for folder in folders:
        random = folder.value(foreign, "image.enable_random_flip", False)
        fixed = folder.value(foreign, "image.enable_fixed_flip", False)
        chances.append(0.5 if random else float(bool(fixed)))
    names = names_of(foreign, folders, "image.enable_random_flip", "image.enable_fixed_flip")
    if len(set(chances)) > 1:
        foreign.refuse_all(names, UNLIKE, f"--set {key}=0.5", key)
    for name in names:
        if foreign.value(name) is True:
            foreign.convert(name, key, chances[0])
        else:
            foreign.ignore(name, "switched off")


def _read_kept_tags(foreign: ForeignConfig, folders: Sequence[Folder]) -> None:
    """Read how many parts of a caption stay in place, which matters where parts are shuffled."""
    shuffled = [
        folder
        for folder in folders
        if folder.value(foreign, "text.enable_tag_shuffling", False) is True
    ]
    said = "one part of a caption stays in place"
    keep = Setting("text.keep_tags_count", "data.captions.keep", 1, said=said)
    if shuffled:
        read_settings(foreign, folders, [keep])
    else:
        for folder in folders:
            foreign.ignore(f"{folder.levels[0]}text.keep_tags_count", "nothing is shuffled")


def _read_variations(foreign: ForeignConfig, folders: Sequence[Folder]) -> None:
    """Read how many crops and captions of a picture are kept: the largest number of all."""
    settings = ("image_variations", "text_variations")
    counts = [folder.value(foreign, setting, 1) for folder in folders for setting in settings]
    numbers = [count for count in counts if isinstance(count, int)]
    for folder in folders:
        for setting in settings:
            name = folder.levels[0] + setting
            if max(numbers, default=1) > 1:
                why = "of crops, flips and captions alike; the most of any folder"
                foreign.convert(name, "data.variants", max(numbers), why)
            else:
                foreign.ignore(name, "one, as here")


def samples(foreign: ForeignConfig) -> None:
    """Read the prompts of which pictures are shown."""
    field = "sample_definition_file_name"
    if not foreign.items("samples") and not _include(foreign, "samples", field):
        foreign.ignore(field, "is not there: no prompts are shown")
        return
    names = ("prompt", "negative_prompt", "diffusion_steps", "cfg_scale")
    found: list[Prompt] = []
    for at in foreign.items("samples"):
        fields = {name: foreign.value(f"{at}.{name}") for name in names}
        prompt = prompt_of(fields, names)
        if foreign.value(f"{at}.enabled", True) is False or prompt is None:
            leave_out_whole(foreign, f"{at}.", "of a sample that is switched off, or has no prompt")
            continue
        foreign.note(f"{at}.prompt", f"data.prompts[{len(found)}]")
        found.append(prompt)
    others = write_prompts(foreign, found, foreign.place_of("samples.0"))
    for at in foreign.items("samples"):
        for name, key in (
            ("negative_prompt", "negative_prompt"),
            ("diffusion_steps", "sample_steps"),
            ("cfg_scale", "guidance"),
        ):
            if foreign.is_set(f"data.{key}"):
                foreign.note(f"{at}.{name}", f"data.{key}" + (f" ({others})" if others else ""))
        leave_out_whole(foreign, f"{at}.", "of a picture that is shown, which changes no training")
    foreign.ignore(field, "the samples are read")
