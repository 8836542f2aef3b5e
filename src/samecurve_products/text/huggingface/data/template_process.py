"""Chat templates are rendered by a process of its own, with limits of time and memory.

A template comes with a model and may be hostile: it may loop for hours, or fill the memory. The
library renders it in a child; the child ends where a conversation takes more than any needs, and
the next one starts another.
"""

import atexit
import json
import os
import pickle
import resource
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from subprocess import DEVNULL, PIPE
from threading import Lock
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError

from samecurve.processes import OUTLIVES
from samecurve.seam import Call, Process, child_environment, how_ended, start_process

Span = tuple[int, int]  # characters [begin, end)

SECONDS = 5  # of processor time, for a short conversation
_BYTES_A_SECOND = 100_000  # of a long one; ordinary templates render some millions
_MEMORY = 1 << 30  # bytes of the child, of which its start takes a fifth
_LONGEST = 1 << 27  # characters of a rendered conversation


class TemplateLimitError(Exception):
    """A chat template makes more text, or does more work, than any conversation needs."""


class TemplateProcess:
    """The child of this process that renders chat templates. It starts with the first one."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._child: Process | None = None
        self._parent = 0  # the process that has started it: a forked one starts its own

    def render(self, template: str, inputs: Mapping[str, Any]) -> tuple[str, list[Span]]:
        """The conversation as text, and the spans that the template marks.

        template: Jinja. inputs: keywords of the library's render_jinja_template.

        TemplateLimitError, or what the template raises: TypeError, TemplateError, RuntimeError.
        """
        request = pickle.dumps((template, inputs))
        with self._lock:
            child = self._started()
            answer = _ask(child, request, SECONDS + len(request) // _BYTES_A_SECOND)
            if answer is None:
                self._child = None
                raise _end_of(child)
        if "error" in answer:
            raise _error_of(answer)
        return answer["text"], [(begin, end) for begin, end in answer["spans"]]

    def close(self) -> None:
        """End the child; it keeps nothing that would be lost."""
        if self._child is not None and self._parent == os.getpid():
            self._child.kill()
            _close(self._child)
            self._child = None

    def _started(self) -> Process:
        if self._child is None or self._parent != os.getpid():
            self._parent = os.getpid()
            atexit.register(self.close)
            environment = child_environment(TRANSFORMERS_VERBOSITY="error")
            call = Call(__name__, (), "serve", environment, ended_by=OUTLIVES)
            self._child = start_process(call, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        return self._child


def _ask(child: Process, request: bytes, seconds: int) -> dict[str, Any] | None:
    """The child's answer. None: it has ended."""
    assert child.stdin
    assert child.stdout
    try:
        pickle.dump((seconds, request), child.stdin)
        child.stdin.flush()
        line = child.stdout.readline()
    except BrokenPipeError:
        return None
    answer: dict[str, Any] | None = json.loads(line) if line.endswith(b"\n") else None
    return answer


def _end_of(child: Process) -> Exception:
    """What the end of a child means. Its pipes are closed."""
    code = _close(child)
    if code == -signal.SIGXCPU:
        return TemplateLimitError("the chat template makes too much text or loops too often")
    return RuntimeError(f"the process that renders it ended with {how_ended(code)}")


def _close(child: Process) -> int:
    """Close the pipes of a child that ends. Returns its exit code."""
    for pipe in (child.stdin, child.stdout):
        assert pipe
        with suppress(BrokenPipeError):  # a request that it has not read
            pipe.close()
    return child.wait()


def _error_of(answer: Mapping[str, Any]) -> Exception:
    text = answer["text"]
    if answer["error"] == "syntax":
        return TemplateSyntaxError(text, answer["line"])
    kinds: dict[str, type[Exception]] = {
        "limit": TemplateLimitError,
        "template": TemplateError,
        "type": TypeError,
    }
    return kinds.get(answer["error"], RuntimeError)(text)


def serve() -> None:
    """Render until there are no more requests. This process's own memory is limited from now on."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its parent
    requests: Any = sys.stdin.buffer  # a buffered reader, which has peek()
    answers = sys.stdout.buffer
    from transformers.utils.chat_template_utils import render_jinja_template

    render: Any = render_jinja_template
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_DATA, _MEMORY)
    while requests.peek(1):
        seconds, request = pickle.load(requests)
        _limit(resource.RLIMIT_CPU, int(time.process_time()) + 1 + seconds)
        answer = json.dumps(_answer(render, *pickle.loads(request)))
        answers.write(answer.encode() + b"\n")
        answers.flush()


def _answer(render: Any, template: str, inputs: Mapping[str, Any]) -> dict[str, Any]:
    try:
        texts, spans = render(chat_template=template, **inputs)
    except MemoryError:
        return {"error": "limit", "text": "the chat template makes too much text"}
    except TemplateSyntaxError as error:
        return {"error": "syntax", "text": error.message, "line": error.lineno}
    except TemplateError as error:
        return {"error": "template", "text": str(error)}
    except TypeError as error:
        return {"error": "type", "text": str(error)}
    except Exception as error:  # templates raise any kind
        return {"error": "other", "text": str(error)}
    if len(texts[0]) > _LONGEST:
        return {"error": "limit", "text": "the chat template makes too much text"}
    return {"text": texts[0], "spans": spans[0] if spans else []}


def _limit(kind: int, most: int) -> None:
    """Limit this process, within what its user's own limit (ulimit) allows."""
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
