"""What a prompt is: text to go on with, or a turn of a conversation."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from test_huggingface import COMMON
from test_huggingface_data import CHATML, TALK

from samecurve.errors import UserError
from samecurve.run.sample_run import Prompt, _check_can_sample
from samecurve.tasks import entry_of, open_task
from samecurve.tasks.protocol import TaskMethods
from tiny import config_of


def config(home: Path, row: dict[str, Any], **data: Any) -> Any:
    (home / "d.jsonl").write_text(json.dumps(row) + "\n")
    (home / "t.jinja").write_text(CHATML)
    return config_of(
        {
            "task": "huggingface",
            "model": {
                **{"architecture": "llama", **COMMON},
                **{"vocab_size": 256, "max_position_embeddings": 256},
            },
            "data": {
                **{"source": str(home / "d.jsonl"), "tokenizer": "bytes", "seq_len": 256},
                **{"chat_template": str(home / "t.jinja"), **data},
            },
            "batch": {"samples": 1},
            "train": {"steps": 1},
            "devices": {"use": "cpu"},
        }
    )


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"messages": TALK}, True),
        ({"text": "rain"}, False),
        ({"prompt": "a", "completion": "b"}, False),
    ],
)
def test_a_prompt_is_what_the_run_was_trained_on(
    row: dict[str, Any], *, turns: bool, tmp_path: Path, cache: Path
) -> None:
    """While it trains, and of what the run has kept, unless a flag says otherwise."""
    here = config(tmp_path, row)
    task = open_task(here, cache)
    kept = tmp_path / "assets"
    kept.mkdir()
    for name, file in task.task.assets().items():
        shutil.copy(file, kept / name)
    torch.manual_seed(0)
    model = task.task.model().eval()
    for opened in (task, entry_of(here.task).open_trained(here, cache, kept)):
        asked: dict[str, Any] = {"tokens": 4, "temperature": 0, "seed": 0}
        answers = {
            chat: opened.respond(
                model, "the sea", **asked, **({} if chat is None else {"chat": chat})
            )
            for chat in (None, True, False)
        }
        assert answers[False].startswith("the sea")
        assert not answers[True].startswith("the sea")
        assert answers[None] == answers[turns]


def test_a_turn_needs_a_template_and_a_task_that_has_turns(tmp_path: Path, cache: Path) -> None:
    task = open_task(config(tmp_path, {"text": "rain"}, chat_template=None), cache)
    asked: dict[str, Any] = {"tokens": 1, "temperature": 0, "seed": 0}
    with pytest.raises(UserError, match="has no chat template"):
        task.respond(task.task.model(), "a", **asked, chat=True)

    class Other:
        def respond(self, _model: Any, prompt: str) -> str:
            return prompt

    class Adapter:
        methods = TaskMethods(Other())

    adapter: Any = Adapter()
    with pytest.raises(UserError, match="language knows no turns") as refused:
        _check_can_sample(adapter, "language", Prompt(text="a", chat=False))
    assert refused.value.where == "--no-chat"
