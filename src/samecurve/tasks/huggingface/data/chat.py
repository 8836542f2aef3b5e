"""Conversations as text by a chat template, and the spans of the text that the assistant says.

A template can mark the spans ({% generation %}). Without marks, a span is taken only where it can
be proved: the rendered whole must begin with the conversation before the turn, rendered with its
generation prompt. Then either the turn's exact content and a special token follow; or the whole
also begins with the conversation including the turn. Any other conversation is refused.
"""

import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import takewhile
from typing import Any

from samecurve.core.system.installation import install_command
from samecurve.errors import UserError

Span = tuple[int, int]  # characters [begin, end)
Messages = Sequence[Mapping[str, Any]]

ASSISTANT = "assistant"
_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_REMEDY = (
    "a template that marks them with {% generation %} ... {% endgeneration %}:"
    " data.chat_template=FILE.jinja"
)


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

    def render(self, messages: Messages, *, tools: Any = None, prompt: bool = False) -> str:
        """The conversation as text. prompt: with the text after which the assistant answers."""
        return self._rendered(messages, tools, prompt=prompt)[0]

    def spans(self, messages: Messages, tools: Any, place: str) -> tuple[str, list[Span]]:
        """The conversation as text, and the assistant's spans: contents and ends of turns.

        UserError: the template refuses the messages, or does not show where a turn lies.
        """
        from jinja2 import TemplateSyntaxError

        try:
            if self._marked:
                return self._rendered(messages, tools, marks=True)
            return self._shown_spans(messages, tools, place)
        except UserError:
            raise
        except TemplateSyntaxError as error:
            raise UserError(
                f"the chat template is no whole Jinja: {error.message} (its line {error.lineno})",
                "correct that line, or data.chat_template=FILE.jinja in place of the template",
                "data.chat_template",
            ) from None
        except Exception as error:  # templates raise any kind
            raise UserError(
                f"the chat template can't render this conversation: {error}",
                "correct the conversation, or data.chat_template=FILE.jinja",
                place,
            ) from None

    def _shown_spans(self, messages: Messages, tools: Any, place: str) -> tuple[str, list[Span]]:
        whole = self.render(messages, tools=tools)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self.render(messages[:number], tools=tools, prompt=True)
            end = None
            if whole.startswith(before):
                end = self._end(whole, before, messages[: number + 1], tools)
            if end is None:
                raise UserError(
                    f"the chat template does not show which tokens turn {number} of the assistant"
                    " has: the conversation up to there is rendered otherwise than in the whole",
                    _REMEDY,
                    place,
                )
            spans.append((len(before), end))
        return whole, spans

    def _end(self, whole: str, before: str, messages: Messages, tools: Any) -> int | None:
        """The end of the last message's turn, which begins after `before`; None: not provable."""
        begin, content = len(before), messages[-1].get("content")
        verbatim = isinstance(content, str) and content and whole.startswith(content, begin)
        end = begin + len(content) if verbatim and isinstance(content, str) else begin
        follows = next((token for token in self._special if whole.startswith(token, end)), "")
        if verbatim and follows and set(messages[-1]) <= {"role", "content"}:
            return end + len(follows)
        through = self.render(messages, tools=tools)
        shown = len(through) > begin and whole.startswith(through)
        if shown and not self._always_prompts(before, through, messages, tools):
            return begin + len(self._without_rest(through[begin:]))
        return end if verbatim else None

    def _always_prompts(self, before: str, through: str, messages: Messages, tools: Any) -> bool:
        """Whether the template always ends with the generation prompt, also where none is asked.

        That prompt would be taken for a part of the turn before it.
        """
        if self.render(messages, tools=tools, prompt=True) != through:
            return False
        alike = takewhile(
            lambda pair: pair[0] == pair[1], zip(before[::-1], through[::-1], strict=False)
        )
        return any(not character.isspace() for character, _ in alike)

    def _without_rest(self, turn: str) -> str:
        """A turn without blanks after its last token: the model stops before them."""
        stripped = turn.rstrip()
        return stripped if stripped.endswith(tuple(self._special)) else turn

    def _rendered(
        self, messages: Messages, tools: Any, *, prompt: bool = False, marks: bool = False
    ) -> tuple[str, list[Span]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        texts, spans = render(
            [[dict(message) for message in messages]],
            tools=tools,
            chat_template=self._text,
            return_assistant_tokens_mask=marks,
            add_generation_prompt=prompt,
            **self._names,
        )
        return texts[0], [tuple(span) for span in spans[0]] if marks else []
