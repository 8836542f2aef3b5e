"""The text encoders of a pipeline, behind the library's own class of it.

The library's encode_prompt() is what a pipeline's captions become: which layers, which pooled
outputs, how long. It is called here, and not written again.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from samecurve_products.pictures.diffusion.families.library import library
from samecurve_products.pictures.diffusion.families.opened import OpenedPipeline


def text_side(opened: OpenedPipeline, parts: Mapping[str, Any], **others: Any) -> Any:
    """The library's pipeline with its text encoders and tokenizers alone.

    others: what else it is made of, by name
    """
    pipeline_class = getattr(library("diffusers"), opened.kind.pipeline)
    parameters = inspect.signature(pipeline_class.__init__).parameters
    needed = [
        name
        for name, parameter in parameters.items()
        if parameter.default is inspect.Parameter.empty and name != "self"
    ]
    tokenizers = [opened.kind.encoders[name] for name in opened.encoders]
    loaded = {name: parts[name] for name in (*opened.encoders, *tokenizers)}
    settings = {name: value for name, value in opened.settings.items() if name in parameters}
    return pipeline_class(**{**dict.fromkeys(needed), **settings, **loaded, **others})


def device_of(opened: OpenedPipeline, parts: Mapping[str, Any]) -> Any:
    """The device of the text encoders."""
    return parts[opened.encoders[0]].device


def count_tokens(tokenizer: Any, texts: Sequence[str]) -> list[int]:
    """The tokens of each text, with those that the tokenizer adds."""
    counts: list[int] = [
        len(ids) for ids in tokenizer(list(texts), truncation=False, padding=False)["input_ids"]
    ]
    return counts


def templated(tokenizer: Any, caption: str, *, enable_thinking: bool) -> str:
    """A caption as the only message of a conversation, as the library's pipelines write it."""
    text: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": caption}],
        tokenize=False,
        add_generation_prompt=True,
        enable_thinking=enable_thinking,
    )
    return text
