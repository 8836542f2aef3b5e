"""Conversations as text, by a tokenizer's own template, and which of it the assistant says.

Where the template marks it ({% generation %}), the marks are taken. Elsewhere a turn's span is only
taken where it can be shown: what the template makes of the conversation before the turn, with its
generation prompt, must be how the whole begins. There the turn's very content must follow, and a
special token; or the conversation with the turn must be how the whole begins, too. Anything else is
refused.
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
    """text: Jinja. names: what it may use (bos_token, eos_token). special: the tokens that text
    can't contain.
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
        """prompt: with what makes the assistant begin."""
        return self._rendered(messages, tools, prompt=prompt)[0]

    def spans(self, messages: Messages, tools: Any, place: str) -> tuple[str, list[Span]]:
        """The whole as text, and what the assistant says of it: contents and ends of turns.

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
                "mend it, or data.chat_template=FILE.jinja in its place",
                "data.chat_template",
            ) from None
        except Exception as error:  # whatever a template raises, or does with unfit messages
            raise UserError(
                f"the chat template can't render this conversation: {error}",
                "mend the conversation, or data.chat_template=FILE.jinja",
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
        """Where the turn that begins after `before` ends, the last of these messages; None: that
        can't be shown.
        """
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
        """Whether the template lets the assistant begin at any end, where nobody asked for it: what
        follows the turn would be taken for a part of it.
        """
        if self.render(messages, tools=tools, prompt=True) != through:
            return False
        alike = takewhile(
            lambda pair: pair[0] == pair[1], zip(before[::-1], through[::-1], strict=False)
        )
        return any(not character.isspace() for character, _ in alike)

    def _without_rest(self, turn: str) -> str:
        """Without blanks after the token that ends it: the model stops before them."""
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
