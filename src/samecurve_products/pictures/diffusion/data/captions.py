"""The caption of a sample: one of its picture's texts, its parts in some order, behind a trigger.

What is drawn comes from a generator that the caller gives; nothing else is random here.
"""

import re

import numpy as np

from samecurve_products.pictures.diffusion.data.scan import Picture
from samecurve_products.pictures.diffusion.sections import Captions


def caption_of(picture: Picture, fields: Captions, random: np.random.Generator | None) -> str:
    """A caption of a picture; "" where it has none, and no trigger.

    random: None: the first text, in its own order
    """
    text = picture.captions[0] if picture.captions else ""
    if random is not None and picture.captions:
        text = picture.captions[int(random.random() * len(picture.captions))]
    if random is not None and fields.shuffle:
        text = _shuffled(text, picture.trigger, fields, random)
    return _with_trigger(text, picture.trigger, fields)


def is_dropped(fields: Captions, random: np.random.Generator | None) -> bool:
    """Whether a sample is trained without its caption. random: None: it is not."""
    return random is not None and bool(random.random() < fields.dropout)


def _shuffled(text: str, trigger: str, fields: Captions, random: np.random.Generator) -> str:
    """The parts of a text, those behind the first `keep` in a random order.

    A part that is the trigger is left out: the trigger stands before all parts.
    """
    parts = [part.strip() for part in text.split(fields.separator)]
    parts = [part for part in parts if part and part != trigger]
    kept, rest = parts[: fields.keep], parts[fields.keep :]
    return _joiner(fields).join([*kept, *(rest[place] for place in random.permutation(len(rest)))])


def _joiner(fields: Captions) -> str:
    """The separator, and a space behind it."""
    return fields.separator if fields.separator[-1].isspace() else f"{fields.separator} "


def _with_trigger(text: str, trigger: str, fields: Captions) -> str:
    """The text behind the trigger, unless it begins with it already, as a whole word."""
    if not trigger or re.match(rf"{re.escape(trigger)}(?!\w)", text):
        return text
    return f"{trigger}{_joiner(fields)}{text}" if text else trigger
