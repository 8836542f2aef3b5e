"""What the pages say is not here is not here.

Every sentence of the pages that says so has a claim below, whose check fails once the thing is
here. A new sentence fails the test until it has a claim; a claim that no page makes fails, too.
"""

import re
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from samecurve.cli.main import all_verbs, find_verb
from samecurve.core.config.document import Document
from samecurve.core.config.json_schema import as_table
from samecurve.core.config.loading import LoadedConfig, load_document
from samecurve.core.strategies import strategies_of
from samecurve.errors import UserError
from samecurve.tasks import Tasks, built_in, open_task
from samecurve.tasks.protocol import MEMBERS

ROOT = Path(__file__).parents[1]
PAGES = [*sorted(ROOT.glob("docs/*.md")), ROOT / "README.md", ROOT / "examples/README.md"]
ABSENCE = re.compile(
    r"(?:is|are) not here\b|[Nn]ot here yet|in this version|later versions?\b"
    r"|This version of Samecurve has|this version has|\| not available \|"
)
Check = Callable[[str], None]  # of a sentence; AssertionError, or pytest's Failed: it is not true


@cache
def names() -> frozenset[str]:
    """All that a user can type, in small letters: keys and words of the config, flags, verbs,
    members of a task, extras; each from its beginning, and from each of its later words.
    """
    typed = [*all_verbs(), *MEMBERS]
    for row in re.findall(r"^\| `[^|]*\|[^|]*\|", as_table(Tasks()), flags=re.MULTILINE):
        typed += re.findall(r"\w+", row)
    for verb in map(find_verb, all_verbs()):
        typed += [name.lstrip("-") for option in verb.params for name in option.opts]
    typed += tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    words = [re.split(r"[-_ ]", name) for name in typed]
    return frozenset(plain("".join(one[at:])) for one in words for at in range(len(one)))


def plain(name: str) -> str:
    return re.sub(r"[-_ ]", "", name).lower()


def nothing_named(*words: str) -> Check:
    """Check that no name that a user can type has a word that begins with one of these."""

    def check(_sentence: str) -> None:
        here = [name for name in names() for word in words if name.startswith(plain(word))]
        assert not here, f"the program has {here}"

    return check


def configured(**sections: object) -> LoadedConfig:
    return load_document(Document({"batch": {"samples": 1}, **sections}), Tasks())


def objectives_of_adapters(sentence: str) -> None:
    """Check that an adapter is refused with the objectives that the sentence names."""
    for objective in re.findall(r"`(\w+)`", sentence):
        model = {"architecture": "bert", "adapter": {"rank": 4}, "objective": objective}
        config = configured(task="huggingface", model=model).config
        with pytest.raises(UserError, match="is not in this version"):
            open_task(config, "")


def all_tasks(sentence: str) -> None:
    """Check that the sentence names all tasks."""
    assert set(re.findall(r"`(\w+)`", sentence)) == set(built_in())


CLAIMS: dict[str, Check] = {
    "DeepSpeed, Megatron-LM, TPUs": nothing_named("deepspeed", "megatron", "tpu"),
    "`deepspeed`, `push_to_hub`": nothing_named("deepspeed", "push_to_hub"),
    "other callbacks, TPUs": nothing_named("callback", "tpu"),
    "ControlNet and video": nothing_named("controlnet", "video", "train text"),
    "Adapters .* `masked` and `embed`": objectives_of_adapters,
    "What this version has": all_tasks,
}


def sentences(page: Path) -> Iterator[str]:
    """The sentences, and rows of tables, that say that something is not here."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for line in text.splitlines():
        parts = [line] if line.startswith("|") else re.split(r"(?<=[.]) (?=[A-Z])", line)
        if not line.startswith("#"):
            yield from filter(ABSENCE.search, parts)


def test_what_pages_say_is_not_here_is_not_here() -> None:
    unclaimed, untrue, made = [], [], set()
    for page in PAGES:
        for sentence in sentences(page):
            claims = [words for words in CLAIMS if re.search(words, sentence)]
            if not claims:
                unclaimed.append(f"{page.name}: {sentence}")
            for words in claims:
                made.add(words)
                try:
                    CLAIMS[words](sentence)
                except (AssertionError, pytest.fail.Exception) as error:
                    untrue.append(f"{page.name}: {sentence}\n    {error}")
    assert not unclaimed, "a claim in this file says how each is checked:\n" + "\n".join(unclaimed)
    assert not untrue, "here by now:\n" + "\n".join(untrue)
    assert made == CLAIMS.keys(), "no page says this any more"


@pytest.mark.parametrize("word", ["ema", "augment", "early stop", "test data", "fp8"])
def test_what_has_come_is_seen(word: str) -> None:
    """Pages said of these that they are not here, for some time after they had come."""
    with pytest.raises(AssertionError, match="the program has"):
        nothing_named(word)("")


def test_strategies_of_the_first_page() -> None:
    """docs/index.md names all strategies of each engine."""
    text = (ROOT / "docs/index.md").read_text()
    for engine in ("torch", "jax"):
        sentence = re.search(rf"The engine `{engine}` has ([^.]*)\.", text)
        assert sentence
        named = {row.name for row in strategies_of(engine)}
        assert set(re.findall(r"`(\w+)`", sentence[1])) == named
