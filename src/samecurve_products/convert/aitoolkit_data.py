"""ai-toolkit's folders of pictures, and the prompts that it shows."""

from collections.abc import Sequence

from samecurve_products.convert.foreign_config import ForeignConfig
from samecurve_products.convert.picture_folders import (
    NO_FOLDER,
    SOURCE,
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
from samecurve_products.convert.prompts import Prompt, prompt_of, write_prompts
from samecurve_products.convert.values import as_float

_TRIGGER = "[trigger]"
_SETTINGS = (
    Setting(
        "caption_ext",
        "data.captions.extension",
        ".txt",
        lambda text: text if str(text).startswith(".") else f".{text}",
    ),
    Setting("caption_dropout_rate", "data.captions.dropout", 0.0, as_float),
    Setting("shuffle_tokens", "data.captions.shuffle", False),
    Setting("keep_tokens", "data.captions.keep", 0),
    Setting("flip_x", "data.flip", False, lambda on: 0.5 if on else 0.0),
    Setting("random_crop", "data.crop", False, lambda on: "random" if on else "center"),
    Setting("buckets", "data.buckets", True),
    Setting("bucket_tolerance", "data.bucket_step", 64),
)
_LACKING = (
    Lacking("flip_y", "mirrors pictures top to bottom"),
    Lacking("random_scale", "scales pictures"),
    Lacking("scale", "scales pictures", off=(None, 1)),
    Lacking("augments", "changes pictures in ways that are not here"),
    Lacking("augmentations", "changes pictures in ways that are not here"),
    Lacking("is_reg", "are pictures for regularisation", "weight of an entry of data.source"),
    Lacking("prior_reg", "are pictures for regularisation"),
    Lacking("token_dropout_rate", "drops parts of captions", "caption_dropout_rate"),
    Lacking("random_triggers", "draws words of captions"),
    Lacking("replacements", "replaces words of captions"),
    Lacking("mask_path", "reads masks from another folder", "data.masks, NAME-masklabel.png"),
    Lacking("alpha_mask", "reads masks from alpha", "data.masks, NAME-masklabel.png"),
    Lacking("control_path", "gives the model a second picture"),
    Lacking("control_path_1", "gives the model a second picture"),
    Lacking("controls", "gives the model a second picture"),
    Lacking("inpaint_path", "gives the model a second picture"),
    Lacking("clip_image_path", "gives the model a second picture"),
    Lacking("unconditional_path", "gives the model a second picture"),
    Lacking("poi", "cuts pictures around a point"),
    Lacking("standardize_images", "scales pictures by their set"),
    Lacking("square_crop", "cuts pictures to squares", "buckets: false"),
    Lacking("num_frames", "is of videos", off=(None, 1)),
    Lacking("diff_output_preservation", "is another objective"),
    Lacking("use_short_captions", "reads captions in another form"),
    Lacking("batch_size", "gives this folder a batch of its own", "train.batch_size"),
    Lacking("control_path_2", "gives the model a second picture"),
    Lacking("control_path_3", "gives the model a second picture"),
    Lacking("control_from_same_folder", "gives the model a second picture"),
    Lacking("clip_image_from_same_folder", "gives the model a second picture"),
    Lacking("do_i2v", "is of videos"),
    Lacking("do_audio", "is of videos"),
    Lacking("auto_frame_count", "is of videos"),
    Lacking("caption_type", "reads captions in another form"),
)


_OF_CACHES = (
    "cache_latents cache_latents_to_disk cache_latents_num_workers cache_tensors_to_disk"
    " cache_text_embeddings cache_clip_vision_to_disk load_image_when_caching_latents num_workers"
    " prefetch_factor fast_image_size debug type extra_values replay_transforms network_weight"
)
_OF_OTHERS = (
    "control_transparent_color full_size_control_images num_controls_from_same_folder invert_mask"
    " mask_min_value random_triggers_max diff_output_preservation_class guidance_type fps"
    " shrink_video_to_frames trim_auto_frame_count_tail audio_preserve_pitch audio_normalize"
    " clip_image_augmentations clip_image_shuffle_augmentations shuffle_augmentations"
)


def data(foreign: ForeignConfig) -> None:
    """Read the folders of pictures."""
    folders = [Folder((f"{at}.",)) for at in foreign.items("datasets")]
    if not folders:
        foreign.refuse_default("datasets", None, "no data is named", NO_FOLDER, SOURCE)
        foreign.keep_refused(SOURCE, "no folder")
    number_folders(folders)
    trigger = foreign.value("trigger_word")
    if trigger:
        foreign.convert("trigger_word", "data.captions.trigger")
    for folder in folders:
        _read_folder(foreign, folder)
    read_repeats(foreign, folders, "num_repeats")
    _read_resolution(foreign, folders)
    read_settings(foreign, folders, _SETTINGS)
    refuse_lacking(foreign, folders, _LACKING)
    leave_out(foreign, folders, _OF_CACHES, "of its caches and its reading")
    leave_out(foreign, folders, _OF_OTHERS, "of what is switched off")
    write_sources(foreign, folders)
    if not foreign.is_set("data.captions.missing"):
        why = "a picture without a caption has an empty one"
        foreign.add_default("data.captions.missing", "empty", why)
    foreign.add_default("data.validation", 0.0, "no picture is held out")


def _read_folder(foreign: ForeignConfig, folder: Folder) -> None:
    """Read what a folder has of its own."""
    for field in ("folder_path", "dataset_path"):
        value = folder.value(foreign, field)
        if value is not None and "source" not in folder.item:
            folder.read(foreign, field, "source", value, "")
    if folder.value(foreign, "trigger_word"):
        word = folder.value(foreign, "trigger_word")
        folder.read(foreign, "trigger_word", "trigger", word, "")
    if folder.value(foreign, "default_caption"):
        why = "is the caption of pictures without one"
        remedy = "a .txt file beside each picture; or data.captions.trigger"
        name = f"{folder.levels[0]}default_caption"
        foreign.refuse(name, why, remedy, "data.captions.missing")
    weight = folder.value(foreign, "loss_multiplier", 1.0)
    if weight != 1:
        why = "a step's sum is divided by the sum of the weights here"
        folder.read(foreign, "loss_multiplier", "weight", weight, why)
    leave_out(foreign, [folder], "loss_multiplier dataset_path", "1, or not read beside another")


def _read_resolution(foreign: ForeignConfig, folders: Sequence[Folder]) -> None:
    """Read the resolution: one number, or a list of one, that all folders share."""
    names, key = names_of(foreign, folders, "resolution"), "data.resolution"
    sides = set()
    for folder in folders:
        value = folder.value(foreign, "resolution", 512)
        parts = value if isinstance(value, list) else [value]
        sides.add(" ".join(map(str, parts)))
    if len(sides) == 1 and next(iter(sides)).isdigit():
        for name in names:
            foreign.convert(name, key, int(next(iter(sides))))
    else:
        why = "is several resolutions; here all folders have one"
        foreign.refuse_all(names, why, f"--set {key}=1024, or a run for each", key)


def prompts(foreign: ForeignConfig) -> None:
    """Read the prompts of which pictures are shown; [trigger] stands for the trigger word."""
    negative, steps = foreign.value("sample.neg"), foreign.value("sample.sample_steps", 20)
    guidance = foreign.value("sample.guidance_scale", 7)
    found: list[Prompt] = []
    texts = foreign.value("sample.prompts", [])
    for text in texts if isinstance(texts, list) else []:
        fields = {"prompt": text, "neg": negative, "steps": steps, "guidance": guidance}
        found += [prompt for prompt in [prompt_of(fields, list(fields))] if prompt]
    for at in foreign.items("sample.samples"):
        names = ("prompt", "neg", "sample_steps", "guidance_scale")
        defaults = (None, negative, steps, guidance)
        pairs = zip(names, defaults, strict=True)
        fields = {name: foreign.value(f"{at}.{name}", default) for name, default in pairs}
        found += [prompt for prompt in [prompt_of(fields, names)] if prompt]
        foreign.note(f"{at}.prompt", f"data.prompts[{len(found) - 1}]")
    trigger = str(foreign.value("trigger_word", ""))
    found = [
        Prompt(one.text.replace(_TRIGGER, trigger), one.negative, one.steps, one.guidance)
        for one in found
    ]
    place = foreign.place_of("sample.prompts") or foreign.place_of("sample.samples.0")
    write_prompts(foreign, found, place)
    foreign.note("sample.prompts", "data.prompts")
    for field, key in (("sample_steps", "sample_steps"), ("guidance_scale", "guidance")):
        if foreign.is_set(f"data.{key}"):
            foreign.note(f"sample.{field}", f"data.{key}")
