"""A tokenizer as AutoTokenizer reads it from a directory."""

import json
import shutil
from pathlib import Path

from samecurve.tasks.huggingface.data.tokenizer import TOKENIZER, TextTokenizer
from samecurve.tasks.language.huggingface import write_tokenizer

_CONFIG = "tokenizer_config.json"


def write_tokenizer_files(
    tokenizer: TextTokenizer | None, to: Path, longest: int | None
) -> list[str]:
    """tokenizer.json and tokenizer_config.json; None: there is none. Returns lines for the user."""
    if tokenizer is None:
        return ["no tokenizer is written: the run was trained on ids alone"]
    if not (tokenizer.home / TOKENIZER).is_file():
        return write_tokenizer(None, to, longest or int(1e30))
    shutil.copyfile(tokenizer.home / TOKENIZER, to / TOKENIZER)
    values = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **tokenizer.notes.names,
    }
    if longest is not None:
        values["model_max_length"] = longest
    if tokenizer.notes.chat_template is not None:
        values["chat_template"] = tokenizer.notes.chat_template
    (to / _CONFIG).write_text(json.dumps(values, indent=1) + "\n")
    return []
