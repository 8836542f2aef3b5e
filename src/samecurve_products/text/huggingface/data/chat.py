"""Conversations as text by a chat template, and the spans of the text that the assistant says.

A template can mark the spans ({% generation %}). Without marks, a span is taken only where it can
be proved: the rendered whole must begin with the conversation before the turn, rendered with its
generation prompt. Then either the turn's own content and a special token follow; or the whole
also begins with the conversation including the turn; or the whole ends as it does with another
text in the turn's place. Any other conversation is refused.
"""

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from samecurve.seam import UserError, counted, install_command
from samecurve_products.text.huggingface.data.messages import (
    ASSISTANT,
    Messages,
    for_template,
    is_learnt,
    python_forms,
    with_parsed_arguments,
)

if TYPE_CHECKING:
    from samecurve_products.text.huggingface.data.template_process import TemplateProcess

Span = tuple[int, int]  # characters [begin, end)

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = (
    "a template that marks them with {% generation %} ... {% endgeneration %}:"
    " data.chat_template=FILE.jinja"
)


@dataclass(frozen=True)
class _Conversation:
    """A conversation. place: its row. learnt: of each message, whether the model learns it."""

    messages: Messages
    tools: Any
    place: str
    learnt: Sequence[bool]


class ChatTemplate:
    """A chat template.

    text: Jinja. names: variables of the template (bos_token, eos_token). special: tokens that a
    text can't contain.
    """

    def __init__(self, text: str, names: Mapping[str, str], special: Sequence[str]) -> None:
        if find_spec("transformers") is None or find_spec("jinja2") is None:
            raise UserError(
                "chat templates need transformers and jinja2: not installed",
                install_command("hf"),
                "data",
            )
        self._text = text
        self._names = dict(names)
        self._special = sorted(special, key=len, reverse=True)
        self._marked = _MARKED.search(text) is not None

    def prompt(self, text: str) -> str:
        """A user's message as text, up to where the assistant answers.

        UserError: the template can't render it.
        """
        with _told_errors("--prompt", "sample --no-chat takes the prompt as plain text"):
            return self._render([{"role": "user", "content": text}], prompt=True)

    def _render(self, messages: Messages, *, tools: Any = None, prompt: bool = False) -> str:
        """The conversation as text. prompt: with the text after which the assistant answers."""
        return self._rendered(messages, tools, prompt=prompt)[0]

    def spans(self, messages: Messages, tools: Any, place: str) -> tuple[str, list[Span]]:
        """The conversation as text, and the assistant's spans: contents and ends of turns.

        UserError: the template refuses the messages, or does not show where a turn lies.
        """
        from jinja2 import TemplateError

        plain = for_template(messages)
        learnt = [is_learnt(message) for message in messages]
        talk = _Conversation(with_parsed_arguments(plain, place), tools, place, learnt)
        with _told_errors(place, "data.chat_template=FILE.jinja in place of the template"):
            try:
                text, spans = self._spans(talk)
            except (TypeError, TemplateError):
                if talk.messages == plain:
                    raise
            else:
                if not self._prints_python(text, talk, plain):
                    return text, spans
            # a template that adds the arguments to a text, or prints them, takes text alone
            return self._spans(replace(talk, messages=plain))

    def _prints_python(self, text: str, talk: _Conversation, plain: Messages) -> bool:
        """Whether the template writes arguments as Python, and as their JSON where they are text.

        text: the conversation with the arguments as objects. plain: the messages with them as texts
        """
        from jinja2 import TemplateError

        forms = [pair for pair in python_forms(plain, talk.messages) if pair[1] in text]
        if not forms:
            return False
        try:
            other = self._render(plain, tools=talk.tools)
        except (TypeError, TemplateError):  # it reads the arguments one by one
            return False
        # what a message says in one of these forms is in both
        return any(
            text.count(python) > other.count(python) and other.count(json) > text.count(json)
            for json, python in forms
        )

    def _spans(self, talk: _Conversation) -> tuple[str, list[Span]]:
        return self._marked_spans(talk) if self._marked else self._shown_spans(talk)

    def _marked_spans(self, talk: _Conversation) -> tuple[str, list[Span]]:
        """The spans that the template marks, less those of messages that are not learnt."""
        text, spans = self._rendered(talk.messages, talk.tools, marks=True)
        turns = [n for n, message in enumerate(talk.messages) if message["role"] == ASSISTANT]
        if all(talk.learnt[number] for number in turns):
            return text, spans
        kept, marks = [], 0
        for number in turns:
            first, end = self._count_marks(talk, number), self._count_marks(talk, number + 1)
            marks += end - first
            kept += spans[first:end] if talk.learnt[number] else []
        if marks != len(spans):
            raise UserError(
                f"the chat template marks {counted(len(spans), 'part')} of this conversation, and"
                f" {marks} where its turns are rendered one by one: it does not show which part"
                " belongs to a turn that is not learnt (`weight` 0 or `train` false)",
                "a template that marks every turn of the assistant:"
                " data.chat_template=FILE.jinja; or leave the row out",
                talk.place,
            )
        return text, kept

    def _count_marks(self, talk: _Conversation, count: int) -> int:
        """The number of parts that the template marks in the first `count` messages."""
        if not count:
            return 0
        return len(self._rendered(talk.messages[:count], talk.tools, marks=True)[1])

    def _shown_spans(self, talk: _Conversation) -> tuple[str, list[Span]]:
        whole = self._render(talk.messages, tools=talk.tools)
        spans = []
        for number, is_turn in enumerate(talk.learnt):
            if not is_turn:
                continue
            before = self._render(talk.messages[:number], tools=talk.tools, prompt=True)
            end = None
            if whole.startswith(before):
                end = self._end(whole, before, talk, number)
            if end is None:
                raise UserError(
                    f"the chat template does not show which tokens turn {number} of the assistant"
                    " has: the conversation up to there is rendered otherwise than in the whole",
                    _REMEDY,
                    talk.place,
                )
            spans.append((len(before), end))
        return whole, spans

    def _end(self, whole: str, before: str, talk: _Conversation, number: int) -> int | None:
        """The end of a message's turn, which begins after `before`; None: not provable."""
        message = talk.messages[number]
        begin, content = len(before), message.get("content")
        is_plain = set(message) <= {"role", "content"}
        verbatim = isinstance(content, str) and content and whole.startswith(content, begin)
        end = begin + len(content) if verbatim and isinstance(content, str) else begin
        if verbatim and is_plain and (follows := self._special_at(whole, end)):
            return end + len(follows)
        messages = talk.messages[: number + 1]
        through = self._render(messages, tools=talk.tools)
        shown = len(through) > begin and whole.startswith(through)
        if shown and not self._always_prompts(before, through, messages, talk.tools):
            turn = through[begin:]
            trimmed = turn.rstrip()  # the model stops before blanks after its last token
            return begin + len(trimmed if trimmed.endswith(tuple(self._special)) else turn)
        if not is_plain:
            return self._end_beside(whole, before, talk, number)
        return end if verbatim else None

    def _end_beside(self, whole: str, before: str, talk: _Conversation, number: int) -> int | None:
        """The end of a turn, by the whole with another text alone in the message's place.

        What follows that text follows the turn too, if the rest of both is the same.
        """
        word = uuid.uuid4().hex
        other = [*talk.messages]
        other[number] = {"role": ASSISTANT, "content": word}
        beside = self._render(other, tools=talk.tools)
        after = beside.rpartition(word)[2]
        end = len(whole) - len(after)
        if not (beside.startswith(before) and whole.endswith(after) and len(before) <= end):
            return None
        return end + len(self._special_at(whole, end))

    def _special_at(self, text: str, place: int) -> str:
        """The special token at a place of a text; '' if there is none."""
        return next((token for token in self._special if text.startswith(token, place)), "")

    def _always_prompts(self, before: str, through: str, messages: Messages, tools: Any) -> bool:
        """Whether the template always ends with the generation prompt, also where none is asked.

        That prompt would be taken for a part of the turn before it.
        """
        if self._render(messages, tools=tools, prompt=True) != through:
            return False
        alike = takewhile(
            lambda pair: pair[0] == pair[1], zip(before[::-1], through[::-1], strict=False)
        )
        return any(not character.isspace() for character, _ in alike)

    def _rendered(
        self, messages: Messages, tools: Any, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        inputs = {
            "conversations": [[dict(message) for message in messages]],
            "tools": tools,
            "return_assistant_tokens_mask": marks,
            "add_generation_prompt": prompt,
            **self._names,
        }
        return _renderer().render(self._text, inputs)


@cache
def _renderer() -> "TemplateProcess":
    """The process that renders all templates of this one."""
    from samecurve_products.text.huggingface.data.template_process import TemplateProcess

    return TemplateProcess()


@contextmanager
def _told_errors(place: str, remedy: str) -> Iterator[None]:
    """Turn what a template raises into a UserError. remedy: what can be done without correcting."""
    from jinja2 import TemplateSyntaxError

    from samecurve_products.text.huggingface.data.template_process import TemplateLimitError

    try:
        yield
    except UserError:
        raise
    except TemplateLimitError as error:
        raise UserError(
            f"{error}, beyond what a conversation needs: it is broken, or meant to do harm",
            f"read the template before you use it; or {remedy}",
            "data.chat_template",
        ) from None
    except TemplateSyntaxError as error:
        raise UserError(
            f"the chat template is no whole Jinja: {error.message} (its line {error.lineno})",
            f"correct that line, or {remedy}",
            "data.chat_template",
        ) from None
    except Exception as error:  # templates raise any kind
        raise UserError(
            f"the chat template can't render this conversation: {error}",
            f"correct the conversation, or {remedy}",
            place,
        ) from None
