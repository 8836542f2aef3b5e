"""kohya's data: the TOML of --dataset_config, or folders named N_CLASS below train_data_dir."""

import math
import re
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
    names_of,
    number_folders,
    read_repeats,
    read_settings,
    refuse_lacking,
    write_sources,
)
from samecurve_products.convert.prompts import prompts_of_lines, write_prompts
from samecurve_products.convert.values import as_float, is_number

_REPEATED = re.compile(r"(\d+)(?:_(.*))?")  # the name of a folder below train_data_dir
_SETTINGS = (
    Setting(
        "caption_extension",
        "data.captions.extension",
        ".caption",
        lambda text: text if str(text).startswith(".") else f".{text}",
        said="captions lie in .caption files",
    ),
    Setting("shuffle_caption", "data.captions.shuffle", False),
    Setting("caption_separator", "data.captions.separator", ","),
    Setting("keep_tokens", "data.captions.keep", 0),
    Setting("caption_dropout_rate", "data.captions.dropout", 0.0, as_float),
    Setting("flip_aug", "data.flip", False, lambda on: 0.5 if on else 0.0),
    Setting("random_crop", "data.crop", False, lambda on: "random" if on else "center"),
    Setting("enable_bucket", "data.buckets", False, said="every picture is cut to a square"),
    Setting("bucket_reso_steps", "data.bucket_step", 64),
    Setting("validation_split", "data.validation", 0.0, as_float, said="no picture is held out"),
)
_LACKING = (
    Lacking("color_aug", "changes the colours of pictures"),
    Lacking("face_crop_aug_range", "cuts pictures around faces"),
    Lacking("caption_suffix", "ends every caption", "data.captions.trigger begins one"),
    Lacking("keep_tokens_separator", "marks the parts of a caption that stay", "keep_tokens"),
    Lacking("secondary_separator", "has parts of a caption within parts"),
    Lacking("enable_wildcard", "draws words of captions"),
    Lacking("caption_dropout_every_n_epochs", "drops captions by epochs", "caption_dropout_rate"),
    Lacking("caption_tag_dropout_rate", "drops parts of captions", "caption_dropout_rate"),
    Lacking("token_warmup_step", "lets captions grow"),
    Lacking("is_reg", "are pictures for regularisation", "weight of an entry of data.source"),
    Lacking("metadata_file", "holds captions in another form", "metadata.jsonl in the folder"),
    Lacking("alpha_mask", "reads masks from alpha", "data.masks, and NAME-masklabel.png"),
    Lacking("conditioning_data_dir", "gives the model a second picture"),
    Lacking(
        "bucket_no_upscale",
        "leaves small pictures small; here they are enlarged",
        "false; or --set data.enlarge=false, which refuses small pictures",
    ),
    Lacking("network_multiplier", "scales the adapter by folder", off=(None, 1)),
)
_UNREAD = "token_warmup_min cache_info custom_attributes resize_interpolation validation_seed"


def data(foreign: ForeignConfig) -> None:
    """Read the folders of pictures, the batch and the prompts."""
    folders = _folders(foreign)
    number_folders(folders)
    for folder in folders:
        _read_captions(foreign, folder)
    read_repeats(foreign, folders, "num_repeats")
    shared = folders or [Folder(("general.", ""))]
    _read_resolution(foreign, shared)
    read_settings(foreign, shared, _SETTINGS)
    refuse_lacking(foreign, shared, _LACKING)
    leave_out(foreign, shared, _UNREAD, "of its caches and its own scaling")
    write_sources(foreign, folders)
    if not foreign.is_set("data.captions.missing"):
        why = "a picture without a caption and a class word has an empty caption"
        foreign.add_default("data.captions.missing", "empty", why)
    _read_batch(foreign, shared)
    _read_prompts(foreign)


def _folders(foreign: ForeignConfig) -> list[Folder]:
    """The folders of the data sets, or those below train_data_dir."""
    name = foreign.value("dataset_config")
    if name is not None:
        document = foreign.companions.document(name, "datasets")
        if document is not None:
            foreign.include(document)
            foreign.ignore("dataset_config", "its data sets are read")
        else:
            foreign.refuse("dataset_config", "is not there", NO_FOLDER, SOURCE)
    folders = [
        Folder((f"{subset}.", f"{dataset}.", "general.", ""))
        for dataset in foreign.items("datasets")
        for subset in foreign.items(f"{dataset}.subsets")
    ]
    for field in ("train_data_dir", "reg_data_dir", "in_json"):
        if folders:
            foreign.ignore(field, "the data sets are read, and win")
    if not folders and foreign.value("train_data_dir") is not None:
        folders = _dreambooth(foreign)
    why = "has no counterpart; entries of data.source have a weight"
    foreign.refuse("reg_data_dir", why, "take it out of the file to train without", SOURCE)
    foreign.refuse("in_json", "holds captions in another form", "metadata.jsonl", SOURCE)
    if not folders and not foreign.value("dataset_config"):
        foreign.refuse_default("dataset_config", None, "no data is named", NO_FOLDER, SOURCE)
    if not folders:
        foreign.keep_refused(SOURCE, f"folders of {name}")
    return folders


def _dreambooth(foreign: ForeignConfig) -> list[Folder]:
    """The folders below train_data_dir whose names are N_CLASS: N repeats of pictures of CLASS.

    CLASS is the caption of its pictures that have none.
    """
    field = "train_data_dir"
    found = foreign.companions.names_in(foreign.value(field))
    matches = [_REPEATED.fullmatch(name) for name in (found[1] if found else [])]
    folders = []
    for match in matches:
        if found is None or match is None or not (found[0] / match[0]).is_dir():
            continue
        if not int(match[1]):  # left out there too
            continue
        folder = Folder(("",), {"source": str(found[0] / match[0]), "repeats": int(match[1])})
        if match[2]:
            folder.item["caption"] = match[2]
        folders.append(folder)
    if folders:
        what = ", ".join(str(folder.item["source"]) for folder in folders)
        foreign.note(field, f"{SOURCE}: {what}")
    else:
        foreign.refuse(field, "holds no folder named N_CLASS, or is not there", NO_FOLDER, SOURCE)
    return folders


def _read_captions(foreign: ForeignConfig, folder: Folder) -> None:
    """Read a folder's path, what begins its captions, and that of pictures without one."""
    if "source" in folder.item:  # of train_data_dir
        return
    folder.read(foreign, "image_dir", "source", folder.value(foreign, "image_dir"), "")
    prefix, word = folder.value(foreign, "caption_prefix"), folder.value(foreign, "class_tokens")
    if prefix:
        folder.read(foreign, "caption_prefix", "trigger", prefix, "before the separator")
    leave_out(foreign, [folder], "caption_prefix", "no text")
    if word:
        folder.read(foreign, "class_tokens", "caption", word, "of pictures without one")
    leave_out(foreign, [folder], "class_tokens", "no text")


def _read_resolution(foreign: ForeignConfig, folders: Sequence[Folder]) -> None:
    """Read the resolution, and how long buckets may be."""
    key = "data.resolution"
    sides = {_sides(folder.value(foreign, "resolution", 512)) for folder in folders}
    names = names_of(foreign, folders, "resolution")
    square = next(iter(sides)) if len(sides) == 1 else None
    if square is None:
        foreign.refuse_all(names, UNLIKE, f"--set {key}=1024, or a run for each", key)
    else:
        why = "" if square[0] == square[1] else "as many pixels; buckets give pictures their shape"
        for name in names:
            foreign.convert(name, key, math.isqrt(square[0] * square[1]), why)
    key, longest = "data.longest", [_longest(foreign, folder) for folder in folders]
    limits = names_of(foreign, folders, "min_bucket_reso", "max_bucket_reso")
    if any(ratio != longest[0] for ratio in longest):
        foreign.refuse_all(limits, UNLIKE, f"--set {key}=2.0", key)
    for name in limits:
        why = "the longest bucket between min_bucket_reso and max_bucket_reso"
        foreign.convert(name, key, longest[0], why)
    if not limits:
        foreign.add_default(key, longest[0], "buckets of 256 to 1024 pixels")


def _sides(value: object) -> tuple[int, int] | None:
    """Width and height of "512,768", 512 or [512, 768]."""
    parts = value if isinstance(value, list) else str(value).split(",")
    numbers = [int(str(part)) for part in parts if str(part).strip().isdigit()]
    if len(numbers) != len(parts) or not 0 < len(numbers) < 3:
        return None
    return numbers[0], numbers[-1]


def _longest(foreign: ForeignConfig, folder: Folder) -> float:
    """Longer side / shorter side of the longest bucket that has the area of the resolution."""
    sides = _sides(folder.value(foreign, "resolution", 512)) or (512, 512)
    low = folder.value(foreign, "min_bucket_reso", 256)
    high = folder.value(foreign, "max_bucket_reso", 1024)
    area = sides[0] * sides[1]
    if not is_number(low) or not is_number(high) or low <= 0 or area <= 0:
        return 2.0
    long = min(float(high), area / float(low))
    return round(min(16.0, max(1.0, long * long / area)), 3)


def _read_batch(foreign: ForeignConfig, folders: Sequence[Folder]) -> None:
    """Read the batch of each GPU: the data sets' own, or the program's."""
    key, field = "batch.per_device", "train_batch_size"
    own = [folder.value(foreign, "batch_size", foreign.value(field, 1)) for folder in folders]
    names = names_of(foreign, folders, "batch_size")
    if any(batch != own[0] for batch in own):
        foreign.refuse_all(names, UNLIKE, f"--set {key}=1", key)
    for name in names:
        foreign.convert(name, key, own[0], "per device, there and here")
    if names:
        foreign.ignore(field, "the data sets have their own")
    foreign.convert(field, key, why="per device, there and here")
    if not foreign.is_set(key):
        foreign.add_default(key, 1, "one sample at once")


def _read_prompts(foreign: ForeignConfig) -> None:
    """Read the prompts of a text file."""
    name = foreign.value("sample_prompts")
    text = foreign.companions.text(name) if str(name).endswith(".txt") else None
    if text is None:
        why = "is not there, or no text file: --set data.prompts='[TEXT]' shows pictures of prompts"
        foreign.ignore("sample_prompts", why)
        return
    place = foreign.place_of("sample_prompts")
    others = write_prompts(foreign, prompts_of_lines(text), place)
    foreign.note("sample_prompts", "data.prompts" + (f" ({others})" if others else ""))
