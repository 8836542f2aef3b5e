"""Text as hubs leave it: the split test is measured, and never trained on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from caches import unmark_checked
from commands import samecurve, write_config
from samecurve.core.config.document import read_document
from samecurve.core.config.loading import load_document
from samecurve.core.protocols import Source
from samecurve.data import IGNORED
from samecurve.errors import UserError
from samecurve.launch.rank_agreement import identity
from samecurve.observe import read_events
from samecurve.tasks import Tasks
from samecurve_products.text.language import LanguageData, LanguageModel, corpus
from samecurve_products.text.language.torch_task import TorchLanguage
from samecurve_products.text_files import use_splits
from samecurve_products.text_files.tokenizer import train_bpe

MODEL = LanguageModel(hidden_size=8, num_layers=1, num_heads=2, max_seq_len=16)
LETTERS = {"train": "a", "valid": "b", "val": "b", "dev": "b", "test": "c"}


def write(home: Path, *names: str) -> None:
    """Files that repeat one letter: that of their split."""
    for name in names:
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        words = name.removeprefix("data/").replace("-", "/").replace(".", "/").split("/")
        (home / name).write_text(LETTERS.get(words[0], "x") * 100)


def task(home: Path, source: str | list[str], **data: Any) -> TorchLanguage:
    return TorchLanguage(MODEL, LanguageData(source=source, **data), home / ".cache")


def letters(source: Source | None) -> str:
    if source is None:
        return ""
    rows = source[np.arange(len(source))]
    read = rows["tokens"][rows["labels"] != IGNORED]
    return "".join(sorted({chr(token) for token in read}))


@pytest.mark.parametrize(
    ("names", "source", "used"),
    [
        (("data/train-00000-of-00002.txt", "data/train-00001-of-00002.txt",
          "data/test-00000-of-00001.txt"), ".", ("a", "a", "c")),
        (("train.txt", "val.txt", "test.txt", "README.md"), ".", ("a", "b", "c")),
        (("train.txt", "val.txt", "test.txt"), "*.txt", ("a", "b", "c")),
        (("train.jsonl", "dev.jsonl", "notes.txt"), ".", ("a", "b", "")),
        (("train/0.txt", "valid/0.txt"), ".", ("a", "b", "")),
        # names that tell no splits apart: all of the text, in the order of the names
        (("train.txt", "test.txt", "other.txt"), ".", ("acx", "a", "")),
        (("train.txt", "test.txt"), "test.txt", ("c", "c", "")),
    ],
)  # fmt: skip
def test_splits_are_found_by_name(
    tmp_path: Path, names: tuple[str, ...], source: str, used: tuple[str, str, str]
) -> None:
    write(tmp_path, *names)
    made = task(tmp_path, str(tmp_path / source), validation=0.1)
    sources = made.train_data(), made.eval_data(), made.test_data()
    assert tuple(map(letters, sources)) == used
    told = source != "test.txt" and "other.txt" not in names
    assert len(made.facts()["notes"]) == told


def test_another_split_all_and_none(tmp_path: Path) -> None:
    write(tmp_path, "train.txt", "val.txt", "test.txt")
    assert letters(task(tmp_path, str(tmp_path), split="test").train_data()) == "c"
    everything = task(tmp_path, str(tmp_path), split="all", validation=0)
    assert letters(everything.train_data()) == "abc"
    assert everything.test_data() is None
    for source, split, cause in (
        (".", "rest", "has no split rest; it has test, train, validation"),
        ("val.txt", "test", "data.split is test, and no source has splits"),
    ):
        with pytest.raises(UserError, match=cause):
            task(tmp_path, str(tmp_path / source), split=split).train_data()


@pytest.mark.parametrize(
    ("files", "remedy"),
    [
        (("test", "validation", "train"), "data.split=train, or data.split=all"),
        (("test", None), "data.split=train, or data.split=all"),  # what names no split
        (("test", "validation", "extra"), "data.split=extra, or data.split=all"),
        (("test", "validation"), "a data.source with a split to train on, or data.split=all"),
    ],
)
def test_the_remedy_of_a_missing_split_names_one_to_train_on(
    files: tuple[str | None, ...], remedy: str
) -> None:
    with pytest.raises(UserError, match="has no split rest") as error:
        use_splits({name: [f"{name}.txt"] for name in files}, "rest", "here")
    assert error.value.remedy.startswith(remedy)


def test_a_bpe_is_made_of_what_is_trained_on(tmp_path: Path) -> None:
    for split, letter in LETTERS.items():
        (tmp_path / f"{split}.txt").write_text(letter * 10_000)
    apart = task(tmp_path, str(tmp_path), tokenizer="bpe:260")
    alone = task(tmp_path, str(tmp_path / "train.txt"), tokenizer="bpe:260", validation=0)
    assert apart.corpus.sha256 == alone.corpus.sha256
    assert apart.train_data()[np.arange(1)]["tokens"].max() >= 256  # pairs of a
    held_out = apart.eval_data()
    assert held_out is not None
    tokens = held_out[np.arange(1)]["tokens"].ravel().tolist()
    assert set(apart.tokenizer().decode(tokens)) == {"b"}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [("a.parquet", "task: huggingface"), ("a.txt.gz", "unpack it"), ("a.bin", "FILE.bin")],
)
def test_what_is_no_text_is_refused(tmp_path: Path, name: str, remedy: str) -> None:
    write(tmp_path, "b.txt", name)
    with pytest.raises(UserError, match=f"{name} is no text") as error:
        task(tmp_path, str(tmp_path)).train_data()
    assert remedy in error.value.remedy


def npz(path: Path) -> bytes:
    np.savez(path, a=np.arange(50))
    return path.read_bytes()


NO_TEXT: dict[str, tuple[Callable[[Path], bytes], str, str]] = {
    "an npz": (npz, "a.npz is no text: it has zero bytes", "a glob that leaves it out"),
    "a zero byte late in a long file": (
        lambda _: b"ab\n" * (2 << 20) + b"\0",
        "is no text: it has zero bytes",
        "a glob that leaves it out",
    ),
    "random bytes without a zero": (
        lambda _: np.random.default_rng(0).integers(1, 256, 5000, np.uint8).tobytes(),
        "of line 1 is no UTF-8",
        "iconv",
    ),
    "latin-1, beyond the first block": (
        lambda _: b"abc\n" * (1 << 20) + b"caf\xe9\n",
        f"the byte 0xe9 of line {(1 << 20) + 1} is no UTF-8",
        "iconv -f latin1 -t utf-8",
    ),
    "a character that is cut off": (lambda _: "caf\u00e9".encode()[:-1], "0xc3 of line 1", "iconv"),
    "utf-16": (lambda _: "rain".encode("utf-16"), "it is UTF-16", "iconv -f utf-16 -t utf-8"),
}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300", "file"])
@pytest.mark.parametrize(("content", "cause", "remedy"), NO_TEXT.values(), ids=NO_TEXT)
def test_bytes_that_are_no_text_are_refused(
    content: Callable[[Path], bytes], cause: str, remedy: str, tokenizer: str, tmp_path: Path
) -> None:
    """Whatever the file's name says, and whichever file of a directory it is."""
    texts = tmp_path / "texts"
    texts.mkdir()
    (texts / "0.txt").write_text("rain " * 40)
    if tokenizer == "file":
        tokenizer = str(tmp_path / "tokenizer.json")
        train_bpe(300, ["rain and snow"], Path(tokenizer))
    assert task(tmp_path, str(texts), tokenizer=tokenizer).corpus.text_bytes == 200
    (texts / "a.npz").write_bytes(content(tmp_path / "made.npz"))
    with pytest.raises(UserError) as error:
        task(tmp_path, str(texts), tokenizer=tokenizer).train_data()
    assert "texts/a.npz" in error.value.cause
    assert cause in error.value.cause
    assert remedy in error.value.remedy
    assert error.value.where == "data.source"


def test_bytes_that_are_no_text_are_refused_of_an_older_cache_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_bytes(b"rain \xe9" * 40)
    (tmp_path / "b.txt").write_bytes(b"rain " * 40)
    with monkeypatch.context() as older:
        older.setattr(corpus, "check_is_text", lambda *_: None)
        task(tmp_path, str(tmp_path / "a.txt")).fingerprint()
        known = task(tmp_path, str(tmp_path / "b.txt")).fingerprint()
    unmark_checked(tmp_path / ".cache")
    for _ in range(2):
        with pytest.raises(UserError, match="0xe9 of line 1 is no UTF-8"):
            task(tmp_path, str(tmp_path / "a.txt")).train_data()
    made = {file: file.stat().st_mtime_ns for file in tmp_path.rglob("tokens.bin")}
    assert task(tmp_path, str(tmp_path / "b.txt")).fingerprint() == known
    monkeypatch.setattr(corpus, "check_is_text", lambda *_: pytest.fail("checked again"))
    assert task(tmp_path, str(tmp_path / "b.txt")).fingerprint() == known
    assert {file: file.stat().st_mtime_ns for file in tmp_path.rglob("tokens.bin")} == made


def test_text_is_utf8_of_any_language_and_ids_are_any_bytes(tmp_path: Path) -> None:
    """A character may lie across two blocks of the check. A .bin file is never read as text."""
    text = "a" + "\u4e16\U0001f600" * (1 << 20)
    (tmp_path / "a.txt").write_text(text, encoding="utf-8")
    assert task(tmp_path, str(tmp_path / "a.txt")).corpus.num_tokens == len(text.encode())
    np.arange(2000, dtype=np.uint32).tofile(tmp_path / "ids.bin")
    fields = MODEL.model_copy(update={"vocab_size": 2000})
    made = TorchLanguage(fields, LanguageData(source=str(tmp_path / "ids.bin")), tmp_path / "cache")
    assert made.corpus.num_tokens == 2000


def test_a_run_evaluates_and_tests_on_its_splits(tmp_path: Path) -> None:
    texts = {"train": "abc" * 200, "val": "abd" * 100, "test": "abe" * 50}
    for name, text in texts.items():
        (tmp_path / f"{name}.txt").write_text(text)
    config = write_config(tmp_path, tmp_path / "*.txt")
    done = samecurve("train", "-f", config, "--save-dir", "run", cwd=tmp_path)
    shown = " ".join((done.stdout + done.stderr).split())
    assert "trained on the split train; validation is evaluated on; test is measured" in shown
    events = {event.kind: event.values for event in read_events(tmp_path / "run/journal.jsonl")}
    samecurve("train", "-f", config, "--save-dir", "two", "--devices", "cpu:2", cwd=tmp_path)
    two = {event.kind: event.values for event in read_events(tmp_path / "two/journal.jsonl")}
    for kind in ("evaluated", "tested"):
        assert two[kind]["loss"] == pytest.approx(events[kind]["loss"], rel=1e-12)
    texts["test"] = "f" * 300
    (tmp_path / "test.txt").write_text(texts["test"])
    again = samecurve("train", "-f", config, "--save-dir", "run", "--max-steps", "70",
                      cwd=tmp_path, code=2)  # fmt: skip
    assert "the data, or how this version reads it, has changed" in again.stderr


@pytest.mark.long
def test_a_run_that_read_all_goes_on_with_all(tmp_path: Path) -> None:
    """The remedy for a run of a version that knew no splits."""
    write(tmp_path, "train.txt", "test.txt")
    config = write_config(tmp_path, tmp_path / "*.txt", steps=2)
    on = ("train", "-f", config, "--save-dir", "run")
    samecurve(*on, "--set", "data.split=all", cwd=tmp_path)
    refused = samecurve(*on, "--max-steps", "3", cwd=tmp_path, code=2).stderr
    assert "how this version reads it" in refused
    assert "data.split=all" in refused
    samecurve(*on, "--max-steps", "3", "--set", "data.split=all", cwd=tmp_path)


def test_ranks_compare_the_split(tmp_path: Path) -> None:
    """Ranks that are started by hand would train on different text."""
    write(tmp_path, "train.txt", "test.txt")
    loaded = load_document(read_document(write_config(tmp_path, tmp_path / "*.txt")), Tasks())
    assert "data.split" in identity(loaded)


def test_the_command_of_a_remedy_quotes_the_path(tmp_path: Path) -> None:
    texts = tmp_path / "my texts.txt"
    texts.write_bytes(b"caf\xe9\n" * 40)
    with pytest.raises(UserError) as error:
        task(tmp_path, str(texts)).train_data()
    assert f"-t utf-8 '{texts}' > new.txt" in error.value.remedy
