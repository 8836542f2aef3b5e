"""A tokenizer's files as transformers' AutoTokenizer reads them: tokenizer.json and its config."""

import json
from pathlib import Path
from typing import Any

_CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}


def write_tokenizer(source: Path | None, to: Path, context: int) -> list[str]:
    """Write tokenizer.json and tokenizer_config.json.

    source: a tokenizer.json; None: bytes. context: tokens that the model takes at most.
    Returns lines for the user.
    """
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(source)) if source else _byte_tokenizer()
    tokenizer.no_truncation()  # as in training
    tokenizer.no_padding()
    tokenizer.save(str(to / "tokenizer.json"))
    write_tokenizer_config(to, {"model_max_length": context})
    if tokenizer.encode("a").ids == tokenizer.encode("a", add_special_tokens=False).ids:
        return []
    return [
        "this tokenizer adds special tokens of its own accord, and training had none: encode"
        " with add_special_tokens=False"
    ]


def write_tokenizer_config(to: Path, fields: dict[str, Any]) -> None:
    """Write tokenizer_config.json. fields: added to those that every tokenizer here has."""
    (to / "tokenizer_config.json").write_text(json.dumps({**_CONFIG, **fields}, indent=1) + "\n")


def _byte_tokenizer() -> Any:
    """Bytes as a tokenizer of the library: byte n is token n."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    # a byte that prints stands for itself; the others get the characters from 256 on, in order
    characters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: ord(character) for character in characters if ord(character) < 256}
    others = [byte for byte in range(256) if byte not in vocab.values()]
    vocab |= zip(characters[len(vocab) :], others, strict=True)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
