"""Rows of named columns as documents: the columns determine a document's kind.

A document is plain text, a prompt and its completion, or a conversation. A classifier reads texts
with labels, and an embedding model reads texts that belong together.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from samecurve.seam import UserError
from samecurve_products.text.huggingface.data.messages import (
    read_messages,
    read_tools,
    type_name,
)

Kind = Literal[  # the cache holds their index in this list
    "text",
    "completion",
    "messages",
    "classified",
    "pair",
    "triple",
    "classified_pair",
    "instruction",
    "turns",  # such rows as a conversation
]
KINDS: tuple[Kind, ...] = get_args(Kind)
Learns = Literal["tokens", "label", "pair"]
COLUMNS: Mapping[Kind, tuple[str, ...]] = {
    "messages": ("messages",),
    "completion": ("prompt", "completion"),
    "instruction": ("instruction", "output"),  # and perhaps INPUT
    "turns": ("instruction", "output"),  # and perhaps INPUT, SYSTEM, HISTORY
    "text": ("text",),
    "classified": ("text",),  # and one of LABELS; only for a classifier
    "classified_pair": ("text", "text_pair"),
    "pair": ("anchor", "positive"),  # only for an embedding model
    "triple": ("anchor", "positive", "negative"),
}
_OF_TOKENS: tuple[Kind, ...] = (  # the first one whose columns a row has
    "messages",
    "completion",
    "instruction",
    "text",
)
_SECOND = {"classified": "text_pair", "pair": "negative"}  # a column that such rows must not have
INPUT, SYSTEM, HISTORY = "input", "system", "history"
LABELS = ("label", "labels")
_LABELLED: tuple[Kind, ...] = ("classified", "classified_pair")

_TOOLS = "tools"  # an optional column for the chat template


@dataclass(frozen=True)
class Document:
    """A document as it was read. text: one part, or several, such as a prompt and its completion.

    opens, closes: False where a text file's document begins, or ends, in another chunk.
    """

    kind: Kind
    place: str
    text: tuple[str, ...] = ()
    messages: Sequence[Mapping[str, Any]] = ()
    tools: Any = None
    label: str | None = None
    opens: bool = True
    closes: bool = True


def kind_of(columns: Sequence[str], place: Path | str, *, learns: Learns) -> Kind:
    if learns == "label":
        if "text" not in columns or not set(LABELS) & set(columns):
            raise no_column(columns, place, learns)
        return "classified_pair" if "text_pair" in columns else "classified"
    if learns == "pair":
        if not set(COLUMNS["pair"]) <= set(columns):
            raise no_column(columns, place, learns)
        return "triple" if "negative" in columns else "pair"
    for kind in _OF_TOKENS:
        if all(name in columns for name in COLUMNS[kind]):
            return kind
    remedy = (
        "rows have `text`, or `prompt` and `completion`, or `instruction` and `output`, or"
        " `messages`: rename the column"
    )
    if "conversations" in columns:
        remedy = (
            'rows have `messages`, a list of {"role": "user" or "assistant", "content": ...}:'
            " rename the column, and `from` and `value` within it"
        )
    raise UserError(
        f"no column says what a document is; there are {', '.join(columns) or 'none'}",
        remedy,
        str(place),
    )


def no_column(columns: Sequence[str], place: Path | str, learns: Learns) -> UserError:
    if learns == "pair":
        return UserError(
            "model.objective embed learns which texts belong together: `anchor` and `positive`"
            f" (and `negative`); there are {', '.join(columns) or 'no columns'}",
            "JSONL, parquet or a saved dataset with these columns: rename them",
            str(place),
        )
    return UserError(
        "model.objective classify learns the label of each text, and no column holds one; there"
        f" are {', '.join(columns) or 'none'}",
        "JSONL, parquet or a saved dataset with `text` and `label` (or `labels`)",
        str(place),
    )


def _label(row: Mapping[str, Any], place: str) -> str:
    """The label of a row. UserError: the label names no class."""
    value = next((row[name] for name in LABELS if row.get(name) is not None), None)
    if isinstance(value, str | int) and str(value):
        return str(value)
    raise UserError(
        f"`label` is {'missing' if value is None else type_name(value)}: it names no class",
        "a text or a whole number; a row that has none is left out of the file",
        place,
    )


def document_of(kind: Kind, row: Mapping[str, Any], place: str) -> Document:
    for name in COLUMNS[kind]:
        if row.get(name) is None:
            what = "is empty (null)" if name in row else f"is missing; it has {', '.join(row)}"
            raise UserError(
                f"`{name}` {what}",
                f"each row has {' and '.join(COLUMNS[kind])}, as the first has: fill it in, or"
                " leave the row out",
                place,
            )
    if kind == "messages":
        messages = read_messages(row["messages"], place)
        return Document(kind, place, messages=messages, tools=read_tools(row.get(_TOOLS), place))
    second = _SECOND.get(kind, "")
    if second in row:
        raise UserError(
            f"this row has a `{second}`, and the first has none: a batch of both has no one loss",
            f"a `{second}` in each row, or in none",
            place,
        )
    texts = tuple(row[name] for name in COLUMNS[kind])
    for name, text in zip(COLUMNS[kind], texts, strict=True):
        if not isinstance(text, str):
            raise UserError(
                f"`{name}` is {type_name(text)}, not text",
                "text; a conversation belongs into `messages`",
                place,
            )
    if kind == "instruction":
        _refuse_dialogue(row, place)
        context = _optional_text(row, INPUT, place)
        return Document("completion", place, (_ask(texts[0], context), texts[1]))
    if kind == "turns":
        tools = read_tools(row.get(_TOOLS), place)
        return Document("messages", place, messages=_turns(row, place), tools=tools)
    label = _label(row, place) if kind in _LABELLED else None
    return Document(kind, place, texts, label=label)


def _refuse_dialogue(row: Mapping[str, Any], place: str) -> None:
    """UserError: a row has what Alpaca's prompt has no place for."""
    for name in (SYSTEM, HISTORY):
        if row.get(name):
            raise UserError(
                f"`{name}` has no place in the prompt of Stanford Alpaca",
                "data.instructions=chat: turns of the chat template, as LLaMA-Factory has them; or"
                f" rows without `{name}`",
                place,
            )


def _turns(row: Mapping[str, Any], place: str) -> list[Mapping[str, Any]]:
    """An instruction and its output as a conversation, as LLaMA-Factory reads such rows."""
    parts = [_optional_text(row, name, place) for name in ("instruction", INPUT)]
    history = row.get(HISTORY) or []
    whole = isinstance(history, list) and all(
        isinstance(pair, list) and len(pair) == 2 and all(isinstance(text, str) for text in pair)
        for pair in history
    )
    if not whole:
        raise UserError(
            f"`{HISTORY}` is no list of pairs",
            'pairs of texts: [["a question", "its answer"]]',
            place,
        )
    pairs = [*history, ["\n".join(part for part in parts if part), row["output"]]]
    system = _optional_text(row, SYSTEM, place)
    turns = [{"role": "system", "content": system}] if system else []
    for asked, answered in pairs:
        turns += [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]
    return list(turns)


def _optional_text(row: Mapping[str, Any], name: str, place: str) -> str:
    """A text that a row may lack. UserError: it is something else."""
    value = row.get(name)
    if value is not None and not isinstance(value, str):
        raise UserError(f"`{name}` is {type_name(value)}, not text", "text, or none", place)
    return value or ""


def _ask(instruction: str, given: str) -> str:
    """The prompt of an instruction, worded as in the first such data set (Stanford Alpaca)."""
    opening = "Below is an instruction that describes a task"
    if given:
        opening += ", paired with an input that provides further context"
    parts = [
        f"{opening}. Write a response that appropriately completes the request.",
        f"### Instruction:\n{instruction}",
        *([f"### Input:\n{given}"] if given else []),
        "### Response:\n",
    ]
    return "\n\n".join(parts)


def wanted_columns(names: Sequence[str], kind: Kind) -> list[str]:
    others = LABELS if kind in _LABELLED else (_TOOLS, INPUT, SYSTEM, HISTORY)
    return [name for name in (*COLUMNS[kind], *others) if name in names]
