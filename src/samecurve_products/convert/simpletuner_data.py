"""SimpleTuner's data sets, which lie in a file of their own (multidatabackend.json)."""

from collections.abc import Sequence

from samecurve.seam import Document
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
from samecurve_products.convert.values import as_float, is_number

_CROP = ("crop", "crop_aspect", "crop_style")
_INSTANCE = ("only_instance_prompt", "prepend_instance_prompt")
_CACHES = {"text_embeds", "image_embeds", "conditioning_image_embeds"}
_MISSING = {"textfile": "refuse", "filename": "name", "instanceprompt": "empty"}
_SPLITS = {"comma": ",", "space": " ", "period": "."}
_UNREAD = (
    "id default metadata_backend metadata_update_interval cache_dir cache_dir_vae text_embeds"
    " image_embeds vae_cache_clear_each_epoch vae_cache_ondemand vae_cache_disable hash_filenames"
    " shorten_filenames skip_file_discovery preserve_data_backend_cache disable_validation disabled"
    " disable write_batch_size caption_shuffle.count caption_shuffle.seed"
    " caption_shuffle.include_original conditioning_type delete_unwanted_images"
    " delete_problematic_images delete_nsfw_images ignore_epochs aspect_bucket_rounding"
)
_SETTINGS = (
    Setting("caption_dropout_probability", "data.captions.dropout", 0.0, as_float),
    Setting("caption_shuffle.enable", "data.captions.shuffle", False),
    Setting(
        "caption_shuffle.split_on",
        "data.captions.separator",
        "comma",
        lambda word: _SPLITS.get(str(word), word),
    ),
    Setting("caption_shuffle.position_start", "data.captions.keep", 0),
)
_LACKING = (
    Lacking("conditioning_data", "gives the model a second picture"),
    Lacking("conditioning", "gives the model a second picture"),
    Lacking("is_regularisation_data", "are pictures for regularisation", "weight in data.source"),
    Lacking("is_regularization_data", "are pictures for regularisation", "weight in data.source"),
    Lacking("probability", "draws pictures by chance", "repeats", off=(None, 1)),
    Lacking("max_num_samples", "takes a part of the pictures", "a folder of them"),
    Lacking("start_epoch", "joins the training later", off=(None, 0, 1)),
    Lacking("start_step", "joins the training later"),
    Lacking("end_epoch", "leaves the training"),
    Lacking("end_step", "leaves the training"),
    Lacking("slider_strength", "is another objective"),
    Lacking("timestep_sampling_offset", "draws times for this folder"),
    Lacking("crop_aspect_buckets", "names the shapes of pictures"),
    Lacking("max_upscale_threshold", "leaves out small pictures"),
    Lacking("minimum_aspect_ratio", "leaves out pictures by their shape"),
    Lacking("maximum_aspect_ratio", "leaves out pictures by their shape"),
    Lacking("caption_filter_list", "takes parts out of captions"),
    Lacking("video", "is of videos"),
    Lacking("disable_multiline_split", "reads lines of a caption as one; here each is a caption"),
)


def data(foreign: ForeignConfig) -> None:
    """Read the folders of pictures."""
    _include(foreign)
    folders = []
    for at in foreign.items("sets"):
        if foreign.value(f"{at}.disabled") is True or foreign.value(f"{at}.disable") is True:
            leave_out_whole(foreign, f"{at}.", "of a data set that is switched off")
        elif str(foreign.value(f"{at}.dataset_type")) in _CACHES:
            leave_out_whole(foreign, f"{at}.", "of its caches")
        elif _is_folder(foreign, at):
            folders.append(Folder((f"{at}.", "")))
    if not folders:
        foreign.keep_refused(SOURCE, "folders that are not known")
    number_folders(folders)
    for folder in folders:
        _read_folder(foreign, folder)
    read_repeats(foreign, folders, "repeats", more=1, why="0 means once, there")
    shared = folders or [Folder(("",))]
    _read_resolution(foreign, shared)
    _read_crop(foreign, folders)
    read_settings(foreign, shared, _SETTINGS)
    _check_sizes(foreign, shared)
    refuse_lacking(foreign, shared, _LACKING)
    leave_out(foreign, folders, _UNREAD, "of its caches and its lists")
    for name in ("caption_strategy", "instance_prompt", *_INSTANCE):
        foreign.ignore(name, "the data sets have their own")
    write_sources(foreign, folders)
    foreign.add_default("data.validation", 0.0, "no picture is held out")


def _include(foreign: ForeignConfig) -> None:
    """Take in the file of the data sets."""
    field = "data_backend_config"
    document = foreign.companions.document(foreign.value(field), "sets")
    if document is None or not isinstance(document.value.get("sets"), list):
        why = "is not there, so its folders of pictures are not known"
        if foreign.value(field) is None:
            foreign.refuse_default(field, None, why, NO_FOLDER, SOURCE)
        foreign.refuse(field, why, NO_FOLDER, SOURCE)
        return
    foreign.include(Document({"sets": document.value["sets"]}, document.origins))
    foreign.ignore(field, "its data sets are read")


def _is_folder(foreign: ForeignConfig, at: str) -> bool:
    """Whether a data set is a folder of pictures on this machine; any other is refused."""
    kind, place = f"{at}.dataset_type", f"{at}.type"
    if foreign.value(kind, "image") != "image":
        foreign.refuse(kind, "is no set of pictures to train on", '"disabled": true', SOURCE)
    elif foreign.value(place, "local") != "local":
        foreign.refuse(place, "is not on this machine", NO_FOLDER, SOURCE)
    else:
        foreign.ignore(kind, "pictures")
        foreign.ignore(place, "on this machine")
        return True
    leave_out_whole(foreign, f"{at}.", "of a data set that is refused")
    return False


def _read_folder(foreign: ForeignConfig, folder: Folder) -> None:
    """Read a folder's path and its captions."""
    own, key = folder.levels[0], "data.captions.missing"
    path = foreign.value(f"{own}instance_data_dir")
    folder.read(foreign, "instance_data_dir", "source", path, "")
    remedy = "train_batch_size of all folders"
    foreign.refuse(f"{own}train_batch_size", "is a batch of its own", remedy, SOURCE)
    name = f"{own}caption_strategy"
    strategy = str(folder.value(foreign, "caption_strategy", "filename"))
    if strategy not in _MISSING:
        foreign.refuse(name, "reads captions in another form", "textfile, filename", key)
        return
    word = folder.value(foreign, "instance_prompt")
    alone = strategy == "instanceprompt" or foreign.value(f"{own}only_instance_prompt") is True
    first = folder.value(foreign, "prepend_instance_prompt") is True
    if word and (alone or first):
        why = "the only caption; .txt files beside pictures are read too" if alone else ""
        folder.read(foreign, "instance_prompt", "trigger", word, why)
    value = "empty" if alone else _MISSING[strategy]
    if foreign.is_set(key) and foreign.document.value["data"]["captions"]["missing"] != value:
        foreign.refuse(name, "is not the same for all folders", f"--set {key}=empty", key)
    elif foreign.value(name) is None:
        foreign.add_default(key, value, f"captions by {strategy}")
    else:
        foreign.convert(name, key, value)
    for field in _INSTANCE:
        foreign.ignore(f"{own}{field}", "read with the captions")


def _read_resolution(foreign: ForeignConfig, folders: Sequence[Folder]) -> None:
    """Read the resolution, in pixels or in millions of them."""
    key, sides = "data.resolution", []
    for folder in folders:
        value = folder.value(foreign, "resolution", 1024)
        kind = folder.value(foreign, "resolution_type", "pixel_area")
        if kind == "area" and is_number(value) and value > 0:
            value = round((value * 1e6) ** 0.5 / 64) * 64
        sides.append(value)
        is_square = folder.value(foreign, "crop") is True
        is_square = is_square and folder.value(foreign, "crop_aspect", "square") == "square"
        for name in folder.names(foreign, "resolution_type"):
            if kind == "pixel" and not is_square:
                why = "is the shorter side of each picture; here its area is that of a square"
                foreign.refuse(name, why, "pixel_area", key)
            else:
                foreign.ignore(name, "as many pixels as a square of that side")
    names = names_of(foreign, folders, "resolution")
    if any(side != sides[0] for side in sides):
        foreign.refuse_all(names, UNLIKE, f"--set {key}=1024, or a run for each", key)
    for name in names:
        foreign.convert(name, key, sides[0])
    if not names and folders:
        foreign.add_default(key, 1024, "1024 pixels")


def _read_crop(foreign: ForeignConfig, folders: Sequence[Folder]) -> None:
    """Read the shapes of pictures: squares, or their own; and where they are cut."""
    found = []
    for folder in folders:
        crop = folder.value(foreign, "crop", False) is True
        aspect = folder.value(foreign, "crop_aspect", "square")
        style = folder.value(foreign, "crop_style", "random")
        if aspect in {"closest", "random"}:
            why = "chooses the shapes of pictures in a way that is not here"
            _refuse_crop(foreign, [folder], why, "crop_aspect: square or preserve")
        if style not in {"random", "center", "centre"}:
            _refuse_crop(foreign, [folder], "cuts pictures elsewhere", "crop_style: center")
        is_square = crop and aspect == "square"
        found.append((not is_square, "random" if crop and style == "random" else "center"))
    if len(set(found)) > 1:
        remedy = "--set data.buckets=true, for all folders"
        _refuse_crop(foreign, folders, UNLIKE, remedy)
        return
    for buckets, crop_at in found[:1]:
        foreign.document.set("data.buckets", buckets, foreign.place_of("sets.0.crop"))
        foreign.document.set("data.crop", crop_at, foreign.place_of("sets.0.crop_style"))
        for name in names_of(foreign, folders, *_CROP):
            foreign.note(name, f"data.buckets {str(buckets).lower()}, data.crop {crop_at}")


def _refuse_crop(foreign: ForeignConfig, folders: Sequence[Folder], why: str, remedy: str) -> None:
    foreign.refuse_all(names_of(foreign, folders, *_CROP), why, remedy, "data.buckets")


def _check_sizes(foreign: ForeignConfig, folders: Sequence[Folder]) -> None:
    """Refuse sizes by which pictures are left out, or cut before they are scaled."""
    names = names_of(foreign, folders, "minimum_image_size")
    why = "leaves out small pictures; here they are enlarged"
    remedy = "0; or --set data.enlarge=false, which refuses small pictures"
    foreign.refuse_all([name for name in names if foreign.value(name)], why, remedy, "data.enlarge")
    for name in names:
        foreign.ignore(name, "no picture is left out")
    why = "pictures are scaled before they are cut, as far as they can be"
    leave_out(foreign, folders, "maximum_image_size target_downsample_size", why)
