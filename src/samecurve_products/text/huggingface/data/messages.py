"""The messages of a conversation, as a row holds them and as a chat template reads them.

Other trainers write two things that no template reads: whether a message is learnt (`weight`, as
OpenAI has it, and `train`), and the JSON of a tool's arguments as text.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from samecurve.seam import UserError

Messages = Sequence[Mapping[str, Any]]

ASSISTANT = "assistant"
_LEARNT = ("weight", "train")  # keys that say whether a message is learnt: 1 or 0, true or false


def read_messages(value: Any, place: str) -> Messages:
    """The messages of a row. UserError: they are no list of messages, or can't be learnt."""
    if not isinstance(value, list):
        raise _no_messages(f"`messages` is {type_name(value)}, not a list of messages", place)
    for number, message in enumerate(value):
        if not isinstance(message, dict):
            raise _no_messages(f"message {number} of `messages` is {type_name(message)}", place)
        if not isinstance(message.get("role"), str):
            has = ", ".join(map(str, message))
            raise _no_messages(f"message {number} of `messages` has no `role`; it has {has}", place)
        _check_learnt(message, number, place)
    value = [
        {**message, "content": _joined(message["content"], f"message {number}", place)}
        if isinstance(message.get("content"), list)
        else message
        for number, message in enumerate(value)
    ]
    # a column of structs has every field in each message, without a value where it is unused
    return [{name: part for name, part in message.items() if part is not None} for message in value]


def is_learnt(message: Mapping[str, Any]) -> bool:
    """Whether the message is a turn that the model learns: the assistant's, unless it says no."""
    return message["role"] == ASSISTANT and all(message.get(key, 1) for key in _LEARNT)


def for_template(messages: Messages) -> list[dict[str, Any]]:
    """The messages without the keys that say whether a message is learnt."""
    return [
        {name: part for name, part in message.items() if name not in _LEARNT}
        for message in messages
    ]


def with_parsed_arguments(messages: Messages, place: str) -> list[dict[str, Any]]:
    """The messages with the arguments of each call as an object, where they are a JSON text.

    UserError: the text is no JSON.
    """
    parsed = []
    for number, message in enumerate(messages):
        parsed.append(dict(message))
        subject = f"the arguments of the call of {{name!r}} in message {number} are"
        calls = message.get("tool_calls")
        if isinstance(calls, list):
            calls = [_parsed(call, "arguments", subject, place) for call in calls]
            parsed[-1]["tool_calls"] = calls
        if "function_call" in message:  # a call as it was written before there were several
            call = _parsed(message["function_call"], "arguments", subject, place)
            parsed[-1]["function_call"] = call
    return parsed


def python_forms(texts: Messages, parsed: Messages) -> Iterator[tuple[str, str]]:
    """The JSON text of each call's arguments, and what Python prints of the object, if no JSON.

    texts: the messages as the row has them. parsed: by `with_parsed_arguments`
    """
    for before, after in zip(map(_arguments, texts), map(_arguments, parsed), strict=True):
        for text, value in zip(before, after, strict=True):
            if text is not value and str(value) != json.dumps(value, ensure_ascii=False):
                yield text.strip(), str(value)


def _arguments(message: Mapping[str, Any]) -> list[Any]:
    """The arguments of a message's calls; None of a call that has none."""
    calls = message.get("tool_calls")
    calls = [*(calls if isinstance(calls, list) else []), message.get("function_call")]
    found = []
    for call in calls:
        inner = call.get("function") if isinstance(call, dict) else None
        function = inner if isinstance(inner, dict) else call
        found.append(function.get("arguments") if isinstance(function, dict) else None)
    return found


def read_tools(tools: Any, place: str) -> Any:
    """The tools of a row; they, or their parameters, may be JSON texts. UserError: no JSON."""
    if isinstance(tools, str):
        tools = _json(tools, "`tools` is", place)
    if not isinstance(tools, list):
        return tools
    subject = "the parameters of tool {name!r} are"
    return [_parsed(tool, "parameters", subject, place) for tool in tools]


def _parsed(function: Any, key: str, subject: str, place: str) -> Any:
    """A call or a tool with `key` as an object. It may have a field `function` with them.

    subject: of a refusal, with {name!r} for the function's name
    """
    if not isinstance(function, dict):
        return function
    if isinstance(function.get("function"), dict):
        return {**function, "function": _parsed(function["function"], key, subject, place)}
    if not isinstance(function.get(key), str):
        return function
    subject = subject.format(name=function.get("name"))
    return {**function, key: _json(function[key], subject, place)}


def _json(text: str, subject: str, place: str) -> Any:
    """The value of a JSON text. subject: of the refusal, with its verb"""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{subject} text that is no JSON: {error}",
            'JSON such as {"city": "Rome"}, as an object or as its text ({} for none); or leave'
            " the row out",
            place,
        ) from None


def _check_learnt(message: Mapping[str, Any], number: int, place: str) -> None:
    """UserError: the message asks for a loss that is not served here."""
    for key in _LEARNT:
        value = message.get(key)
        if message["role"] == ASSISTANT:
            served = value is None or value in (0, 1)
            remedy = "1 or true: it is learnt; 0 or false: it is read, and not learnt"
        else:
            served = key == "weight" or value is not True
            remedy = "only what the assistant says is learnt: leave `train` out of other messages"
        if not served:
            raise UserError(f"`{key}` of message {number} is {value!r}", remedy, place)


def _joined(parts: Sequence[Any], where: str, place: str) -> str:
    """The text of a content that is a list of parts. UserError: a part is no text."""
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    whole = []
    for part, text in zip(parts, texts, strict=True):
        if isinstance(text, str):
            whole.append(text)
        else:
            kind = part.get("type", "unknown") if isinstance(part, dict) else type_name(part)
            raise UserError(
                f"the `content` of {where} has a part of type {kind}: only text is learnt here",
                'parts of {"type": "text", "text": ...}, or one text; leave rows with others out',
                place,
            )
    return "".join(whole)


def _no_messages(cause: str, place: str) -> UserError:
    remedy = 'a list such as [{"role": "user", "content": "..."}, {"role": "assistant", ...}]'
    return UserError(cause, remedy, place)


def type_name(value: Any) -> str:
    """What a value is, for the user."""
    names = {"dict": "an object", "list": "a list of other things", "str": "text"}
    name = type(value).__name__
    return names.get(name, f"{name} ({value})")
