"""Input that can't be honoured: a cause, a remedy and a place, before anything is written."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_huggingface import COMMON
from test_huggingface_data import CHATML, MARKED, TALK
from test_huggingface_weights import library_model

from samecurve.core.planning.machine import Device, Machine
from samecurve.errors import InvalidConfigError, UserError
from samecurve_products.text.huggingface.library import read_config
from samecurve_products.text.huggingface.sections import HFModel
from starts import start

Values = dict[str, Any]
LLAMA = {"architecture": "llama", **COMMON, "vocab_size": 256}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("base")
    library_model("llama", vocab_size=256).save_pretrained(home)
    return home


def values(home: Path, lines: str | None = None, **sections: Values) -> Values:
    """Of a run that would do. lines: of its JSONL file."""
    (home / "d.jsonl").write_text(lines if lines is not None else '{"text": "rain and salt"}\n' * 9)
    fields: Values = {
        "task": "huggingface",
        "model": LLAMA,
        "data": {"source": str(home / "d.jsonl"), "tokenizer": "bytes", "seq_len": 16},
        "batch": {"samples": 2},
        "train": {"steps": 2},
        "devices": {"use": "cpu:1"},
    }
    for name, section in sections.items():
        fields[name] = section if "path" in section else {**fields[name], **section}
    return fields


def a_directory(
    weights: bytes | None = None, **files: Values
) -> Callable[[Path, Path], dict[str, Values]]:
    """A copy of the base's config, with these weights and files."""

    def write(home: Path, base: Path) -> dict[str, Values]:
        there = home / "model"
        there.mkdir()
        for name, content in {
            "config": json.loads((base / "config.json").read_text()),
            **files,
        }.items():
            if content:
                (there / f"{name}.json").write_text(json.dumps(content))
        if weights is not None:
            (there / "model.safetensors").write_bytes(weights)
        return {"model": {"path": str(there)}}

    return write


def data(content: str | None, **fields: Any) -> Callable[[Path, Path], dict[str, Any]]:
    """This JSONL file, and fields of `data`."""
    return lambda _home, _base: {"lines": content, "fields": fields}


def chats(template: str, talk: list[dict[str, str]]) -> Callable[[Path, Path], dict[str, Any]]:
    def write(home: Path, _base: Path) -> dict[str, Any]:
        (home / "t.jinja").write_text(template)
        content = json.dumps({"messages": talk}) + "\n"
        return {"lines": content, "fields": {"chat_template": str(home / "t.jinja")}}

    return write


def source(name: str, content: bytes | None = None, weight: float | None = None) -> Any:
    """A source of this name, and what the file holds."""

    def write(home: Path, _base: Path) -> dict[str, Any]:
        if name.endswith("/"):
            (home / name).mkdir()
        elif content is not None:
            (home / name).write_bytes(content)
        one: Any = str(home / name)
        return {
            "fields": {"source": one if weight is None else [{"source": one, "weight": weight}]}
        }

    return write


def parquet(column: list[Any]) -> Callable[[Path, Path], dict[str, Any]]:
    def write(home: Path, _base: Path) -> dict[str, Any]:
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet as files

        table = pyarrow.table({"text": pyarrow.array(column, pyarrow.string())})
        files.write_table(table, home / "d.parquet")
        return {"fields": {"source": str(home / "d.parquet")}}

    return write


def model(**fields: Any) -> Callable[[Path, Path], dict[str, Values]]:
    return lambda _home, _base: {"model": fields}


def deep_json(home: Path, base: Path) -> dict[str, Values]:
    there = a_directory()(home, base)
    (home / "model" / "config.json").write_text("[" * 100_000)
    return there


def broken_tokenizer(content: str, **files: str) -> Callable[[Path, Path], dict[str, Any]]:
    """A directory with this tokenizer.json."""

    def write(home: Path, _base: Path) -> dict[str, Any]:
        there = home / "tokenizer"
        there.mkdir()
        (there / "tokenizer.json").write_text(content)
        for name, text in files.items():
            (there / f"{name}.json").write_text(text)
        return {"fields": {"tokenizer": str(there)}}

    return write


def stretched() -> str:
    """A tokenizer.json that writes ten letters for one, fifteen times."""
    rule = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 10}
    rules = {"type": "Sequence", "normalizers": [rule] * 15}
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    return json.dumps({"normalizer": rules, "model": words})


def with_own_tokenizer(home: Path, base: Path) -> dict[str, Values]:
    """Of more tokens than the model beside it."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    there = a_directory()(home, base)
    words = {"rain": 0, "and": 1, "salt": 300}
    own = Tokenizer(models.WordLevel(words, unk_token="and"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    own.save(str(home / "model" / "tokenizer.json"))
    return {**there, "fields": {"tokenizer": None}}


CASES: dict[str, tuple[Any, str, str, str]] = {  # what is bad; cause, remedy, place
    "no directory": (
        model(path="org/name"),
        "nothing is downloaded",
        "on this machine",
        "model.path",
    ),
    "rotary positions of no kind": (
        a_directory(
            config={"model_type": "llama", "rope_scaling": {"rope_type": "wobbly", "factor": 2.0}}
        ),
        "config.json: the installed transformers knows no rope_type wobbly",
        "one of default, linear",
        "model",
    ),
    "rotary positions of a layer's own, of no kind": (
        model(**LLAMA, rope_parameters={"full_attention": {"rope_type": "wobbly"}}),
        "knows no rope_type wobbly",
        "a newer transformers",
        "model",
    ),
    "an activation of no kind": (
        model(**LLAMA, hidden_act="wobbly"),
        "LlamaForCausalLM: KeyError",
        "values that fit each other",
        "model",
    ),
    "no config": (a_directory(config={}), "has no config.json", "save_pretrained", "model.path"),
    "an adapter": (
        a_directory(config={}, adapter_config={"r": 4}),
        "holds an adapter",
        "merge it",
        "model.path",
    ),
    "no weights": (a_directory(), "has no model.safetensors", "a directory with", "model.path"),
    "cut weights": (a_directory(b"12"), "can't be read", "get it again", "model.path"),
    "small vocabulary": (
        model(**{**LLAMA, "vocab_size": 99}),
        "knows 99 tokens; the tokenizer bytes has 256",
        "vocab_size=256",
        "data.tokenizer",
    ),
    "own tokenizer": (
        with_own_tokenizer,
        "knows 256 tokens; the tokenizer",
        "resize_token_embeddings(301)",
        "model.path",
    ),
    "long rows": (data(None, seq_len=65), "knows 64 positions", "--seq-len 64", "data.seq_len"),
    "no assistant": (
        chats(CHATML, TALK[:1]),
        "no conversation has a turn of the assistant",
        '"role": "assistant"',
        "data.source",
    ),
    "nothing marked": (
        chats(MARKED.replace("== 'assistant'", "== 'nobody'"), TALK),
        "marks nothing of 1 conversations",
        "{% generation %}",
        "data.chat_template",
    ),
    "broken template": (
        chats("{% for m in messages %}", TALK),
        "the chat template is no whole Jinja",
        "correct that line",
        "data.chat_template",
    ),
    "other turns": (
        data('{"conversations": [{"from": "human", "value": "a"}]}\n'),
        "there are conversations",
        "`from` and `value`",
        "d.jsonl:1",
    ),
    "no role": (
        data('{"messages": [{"from": "human", "value": "a"}]}\n'),
        "message 0 of `messages` has no `role`; it has from, value",
        '"role"',
        "d.jsonl:1",
    ),
    "no JSON": (
        data('{"text": "a"}\n{"text": oops\n'),
        "not one JSON object",
        "make it again",
        "d.jsonl:2",
    ),
    "null column": (
        parquet([None, None]),
        "`text` is empty: 2 rows",
        "with something",
        "data.source",
    ),
    "blank column": (parquet(["", ""]), "holds no text", "with text in it", "data.source"),
    "no parquet": (
        source("d.parquet", b"PAR1"),
        "no whole parquet",
        "copy it again",
        "data.source",
    ),
    "empty file": (source("e.txt", b""), "holds no text", "with text in it", "data.source"),
    "no file": (source("gone.txt"), "no such file", "globs", "data.source"),
    "empty directory": (source("e/"), "an empty directory", "globs", "data.source"),
    "packed file": (source("d.jsonl.gz", b""), "is compressed", "unpack", "data.source"),
    "no weight": (source("d.jsonl", None, 0), "greater than 0 (is 0)", "schema", "weight"),
    "below 0": (source("d.jsonl", None, -1), "greater than 0 (is -1)", "schema", "weight"),
    "little weight": (
        source("d.jsonl", None, 1e-3),
        "the weight's share (0.001)",
        "a larger weight",
        "data.source",
    ),
    "a latin-1 byte": (
        source("x.jsonl", '{"text": "rain"}\n{"text": "caf\u00e9"}\n'.encode("latin-1")),
        "the byte 0xe9 is no UTF-8",
        "iconv -f latin1 -t utf-8",
        "x.jsonl:2",
    ),
    "a picture": (
        chats(CHATML, [{"role": "user", "content": [{"type": "image"}]}]),  # type: ignore[dict-item]
        "the `content` of message 0 has a part of type image",
        '{"type": "text", "text": ...}',
        "d.jsonl:1",
    ),
    "a near name of ours": (
        model(**LLAMA, adaptor={"kind": "lora"}),
        "model.adaptor: neither this program nor llama's config",
        "did you mean adapter",
        "model.adaptor",
    ),
    "a negative width": (
        a_directory(config={"model_type": "llama", "hidden_size": -32}),
        "hidden_size is -32",
        "from 1 on",
        "model.path",
    ),
    "layers without an end": (
        a_directory(config={"model_type": "qwen3", "num_hidden_layers": 100_000_000}),
        "num_hidden_layers is 100000000; a model here has 4096",
        "the number of layers",
        "model.path",
    ),
    "layers of fields": (
        model(**{**LLAMA, "num_hidden_layers": 10**8}),
        "num_hidden_layers is 100000000",
        "the number of layers",
        "model",
    ),
    "deep JSON": (deep_json, "is no model's config", "save_pretrained", "model.path"),
    "a broken tokenizer": (
        broken_tokenizer('{"model": {"type": "WordLevel", "vocab": {"b": 0}, "unk_token": "u"}}'),
        "can't encode",
        "knows every byte",
        "data.tokenizer",
    ),
    "a tokenizer without form": (
        broken_tokenizer('{"model": {"type": "Unigram", "vocab": [], "unk_id": 7}}'),
        "is no tokenizer.json",
        "`tokenizers` library",
        "data.tokenizer",
    ),
    "a tokenizer that stretches texts": (
        broken_tokenizer(stretched()),
        "its normalizer can make a text 1e+15 times as long",
        "whom you trust",
        "data.tokenizer",
    ),
    "notes of no tokenizer": (
        broken_tokenizer("{}", tokenizer_notes='{"name": "x", "names": [1]}'),
        "can't be read as a tokenizer's notes",
        "copy it again",
        "data.tokenizer",
    ),
    "quantized from nothing": (
        model(**LLAMA, quantize="4bit"),
        "quantize",
        "",
        "model.quantize",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input_is_refused_and_nothing_is_written(
    name: str, base: Path, tmp_path: Path, cache: Path
) -> None:
    write, cause, remedy, where = CASES[name]
    bad = write(tmp_path, base)
    content, fields = bad.pop("lines", None), bad.pop("fields", {})
    with pytest.raises(UserError) as refused:
        start(tmp_path / "run", values(tmp_path, content, data=fields, **bad), cache)
    error = refused.value
    if isinstance(error, InvalidConfigError):
        error = error.errors[0]
    assert cause in error.cause
    assert remedy in error.remedy
    assert error.where.endswith(where) or where in error.cause
    assert error.exit_code == 2
    assert not (tmp_path / "run").exists()


def test_the_same_input_without_a_fault_is_taken(base: Path, tmp_path: Path, cache: Path) -> None:
    start(tmp_path / "run", values(tmp_path, model={"path": str(base)}), cache)
    assert (tmp_path / "run" / "plan.json").exists()


@pytest.mark.parametrize("name", ["llama", "qwen2_5_vl", "qwen3_5"])
def test_the_librarys_own_config_is_taken(name: str) -> None:
    """Parts that see pictures have rotary positions of a kind that other models have not: axial."""
    fields = HFModel.model_validate({"architecture": name, "objective": "embed"})
    assert read_config(fields).model_type == name


@pytest.mark.parametrize(
    ("name", "part", "kind"),
    [("qwen2_5_vl", "vision_config", "wobbly"), ("qwen2_5_vl", "text_config", "axial")],
)
def test_a_part_with_rotary_positions_that_it_has_not_is_refused(
    name: str, part: str, kind: str
) -> None:
    values = {part: {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4}}}
    fields = HFModel.model_validate({"architecture": name, "objective": "embed", **values})
    with pytest.raises(UserError, match=f"{part}: the installed .* knows no rope_type {kind}"):
        read_config(fields)


@pytest.mark.parametrize(
    ("gpu", "capability", "has"),
    [("Tesla T4", "7.5", False), ("Tesla V100-SXM2-32GB", "", False), ("NVIDIA L4", "8.9", True)],
)
def test_bf16_needs_a_device_that_has_it(gpu: str, capability: str, *, has: bool) -> None:
    device = Device(kind="cuda", index=0, name=gpu, memory=16 << 30, capability=capability)
    assert device.lacks("bf16") is not has
    assert not device.lacks("f16")
    assert not Machine(devices=(), links=(), host_bytes=1, cores=1).ranks_on_cpu(1)[0].lacks("bf16")
