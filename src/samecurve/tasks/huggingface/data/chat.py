"""Conversations as text by a chat template, and the spans of the text that the assistant says.

A template can mark the spans ({% generation %}). Without marks, a span is taken only where it can
be proved: the rendered whole must begin with the conversation before the turn, rendered with its
generation prompt. Then either the turn's exact content and a special token follow; or the whole
also begins with the conversation including the turn. Any other conversation is refused.
"""

import re
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from samecurve.core.system.installation import install_command
from samecurve.errors import UserError

if TYPE_CHECKING:
    from samecurve.tasks.huggingface.data.template_limits import LimitedTemplate

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
        self._limited: LimitedTemplate | None = None
        # compiled by the library, without limits; it has the word that the library looks for
        self._stand_in = f"{{# {uuid.uuid4()} {{% generation %}} #}}"

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
        with _told_errors(place, "data.chat_template=FILE.jinja in place of the template"):
            if self._marked:
                return self._rendered(messages, tools, marks=True)
            return self._shown_spans(messages, tools, place)

    def _shown_spans(self, messages: Messages, tools: Any, place: str) -> tuple[str, list[Span]]:
        whole = self._render(messages, tools=tools)
        spans = []
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            before = self._render(messages[:number], tools=tools, prompt=True)
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
        through = self._render(messages, tools=tools)
        shown = len(through) > begin and whole.startswith(through)
        if shown and not self._always_prompts(before, through, messages, tools):
            turn = through[begin:]
            trimmed = turn.rstrip()  # the model stops before blanks after its last token
            return begin + len(trimmed if trimmed.endswith(tuple(self._special)) else turn)
        return end if verbatim else None

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
        from transformers.utils.chat_template_utils import render_jinja_template

        render: Any = render_jinja_template
        with self._limits(messages, tools):
            texts, spans = render(
                [[dict(message) for message in messages]],
                tools=tools,
                chat_template=self._stand_in,
                return_assistant_tokens_mask=marks,
                add_generation_prompt=prompt,
                **self._names,
            )
        return texts[0], [tuple(span) for span in spans[0]] if marks else []

    @contextmanager
    def _limits(self, *inputs: Any) -> Iterator[None]:
        """Let the library's stand-in render this template, counted, within the block."""
        from transformers.utils.chat_template_utils import _compile_jinja_template

        from samecurve.tasks.huggingface.data.template_limits import LimitedTemplate

        template: Any = _compile_jinja_template(self._stand_in)  # the library keeps it
        if self._limited is None or self._limited.place is not template:
            self._limited = LimitedTemplate(self._text, template)
        with self._limited.counted(*inputs):
            yield


@contextmanager
def _told_errors(place: str, remedy: str) -> Iterator[None]:
    """Turn what a template raises into a UserError. remedy: what can be done without correcting."""
    from jinja2 import TemplateSyntaxError

    from samecurve.tasks.huggingface.data.template_meter import TemplateLimitError

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
