"""The form of a new run: presets, fields, plans, config files; a user's code stays outside."""

import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from noise_pictures import write_pictures
from PIL import Image
from tiny_pipelines import save_sd15

from samecurve.cli.load_config import load_config
from samecurve.cli.main import find_verb
from samecurve.core.config import flatten
from samecurve.core.config.document import Document, dump_document, read_document
from samecurve.core.config.loading import load_document
from samecurve.errors import UserError
from samecurve.tasks import Tasks, built_in
from samecurve_products.init.presets import all_presets
from samecurve_products.page.form.fields import FormFields, form_fields
from samecurve_products.page.form.plan_worker import PlanRefusedError, PlanWorker
from samecurve_products.page.form.values import apply_values, read_values, shown_values
from samecurve_products.page.form.written import check_name

SOURCE = Path(__file__).parents[2]
SMALL = {"kind": "preset", "id": "small-language-model"}
TINY = """\
# A tiny config
task: language
model: {hidden_size: 32, num_layers: 1, num_heads: 2, max_seq_len: 16}
data: {source: squares.txt, prompts: ["the "]}
batch: {samples: 8}
train: {steps: 20}
"""
LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 4096,
}
BERT = {**LLAMA, "model_type": "bert", "architectures": ["BertModel"]}
PICTURES = [name for name, preset in all_presets().items() if preset.task == "diffusion"]
# their plans build large models, or read a library's
SLOW = {
    *("chat-24gb", "gpt2-class-language-model", "continue-pretraining-lora"),
    *("small-language-model", "picture-classes", "text-classifier", "library-model-from-scratch"),
}
# what presets need of the user
GIVEN: Mapping[str, Mapping[str, Any]] = {
    "small-language-model": {"data.source": "squares.txt"},
    "gpt2-class-language-model": {"data.source": "squares.txt", "data.tokenizer": "bpe:300"},
    "library-model-from-scratch": {"data.source": "squares.txt", "data.tokenizer": "bpe:300"},
    "chat-24gb": {
        "model.path": "llama",
        "data.source": "sums.jsonl",
        "data.chat_template": "plain.jinja",
        "data.tokenizer": "bytes",
    },
    "continue-pretraining-lora": {
        "model.path": "llama",
        "data.source": "squares.txt",
        "data.seq_len": 128,
        "data.tokenizer": "bytes",
    },
    "text-classifier": {
        "model.path": "bert",
        "data.source": "labels.jsonl",
        "data.tokenizer": "bytes",
    },
    "sentence-embeddings": {
        "model.path": "bert",
        "data.source": "number-names.jsonl",
        "data.tokenizer": "bytes",
    },
    "picture-lora": {
        "model.path": "pipeline",
        "data.source": "pictures",
        "data.resolution": 64,
        "devices.offload_frozen": 1.0,
    },
    "picture-classes": {"data.source": "classes"},
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    home = tmp_path_factory.mktemp("root")
    shutil.copy(corpus, home / "squares.txt")
    (home / "tiny.yaml").write_text(TINY)
    for name, values in (("llama", LLAMA), ("bert", BERT)):
        (home / name).mkdir()
        (home / name / "config.json").write_text(json.dumps(values))
    for file in ("models/chats/sums.jsonl", "models/chats/plain.jinja"):
        shutil.copy(SOURCE / file, home)
    shutil.copy(SOURCE / "examples/number-names.jsonl", home)
    rows = [{"text": f"number {n}", "label": "even" if n % 2 else "odd"} for n in range(40)]
    (home / "labels.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    for name in ("light", "dark"):
        (home / "classes" / name).mkdir(parents=True)
        for number in range(4):
            grey = number + (200 if name == "light" else 0)
            Image.new("RGB", (32, 32), (grey,) * 3).save(home / "classes" / name / f"{number}.png")
    return home


@pytest.fixture(scope="module")
def pictures(root: Path) -> None:
    """A pipeline and captioned pictures."""
    save_sd15(root / "pipeline")
    write_pictures(root / "pictures")


@pytest.fixture(scope="module")
def worker(root: Path, cache: Path) -> Iterator[PlanWorker]:
    del cache
    worker = PlanWorker([root])
    yield worker
    worker.close()


def config_base(worker: PlanWorker, path: str) -> dict[str, str]:
    configs = worker.ask("bases", {})["configs"]
    return {"kind": "config", "id": next(row["id"] for row in configs if row["path"] == path)}


def own_task(home: Path, name: str, text: str) -> None:
    """A task of the user's own, and its config."""
    (home / f"{name}.py").write_text(text)
    config = f"task: {name}.py:Mine\nbatch: {{samples: 4}}\ntrain: {{steps: 2}}\n"
    (home / f"{name}.yaml").write_text(config)


def errors_of(worker: PlanWorker, base: object, values: Mapping[str, Any]) -> list[dict[str, str]]:
    answer = worker.ask("plan", {"base": base, "values": values})
    assert answer["ok"] is not bool(answer["errors"])
    errors: list[dict[str, str]] = answer["errors"]
    return errors


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] if name in SLOW else [])
        for name in all_presets()
        if name not in PICTURES
    ],
)
def test_every_preset_has_a_form_and_a_plan(worker: PlanWorker, name: str) -> None:
    check_preset(worker, name)


@pytest.mark.long
@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("name", PICTURES)
def test_so_has_every_preset_for_pictures(worker: PlanWorker, name: str) -> None:
    check_preset(worker, name)


def check_preset(worker: PlanWorker, name: str) -> None:
    """Its form has fields, it asks for what it needs, and with that there is a plan."""
    base = {"kind": "preset", "id": name}
    form = worker.ask("form", {"base": base})
    fields = [field for group in form["groups"] for field in group["fields"]]
    assert {"task", "batch.samples", "optimizer.lr", "train.steps"} <= {f["key"] for f in fields}
    assert all(field["label"] and field["kind"] for field in fields)
    needs = all_presets()[name].needs
    missing = {error["key"] for error in errors_of(worker, base, {})} if needs else set()
    assert missing == set(needs)
    answer = worker.ask("plan", {"base": base, "values": GIVEN.get(name, {})})
    assert answer["ok"], answer["errors"]
    kinds = [block["type"] for block in answer["blocks"]]
    assert {"cards", "bars", "table"} <= set(kinds)
    assert answer["command"].startswith(f"samecurve train -f configs/{name}.yaml")


def test_there_are_presets_for_every_task() -> None:
    assert {preset.task for preset in all_presets().values()} == set(built_in())


@pytest.mark.long
@pytest.mark.usefixtures("pictures")
def test_what_a_picture_lora_lacks_stands_beside_its_field(worker: PlanWorker, root: Path) -> None:
    base, given = {"kind": "preset", "id": "picture-lora"}, GIVEN["picture-lora"]
    (root / "empty").mkdir()
    for key, value, cause in (
        ("model.path", "nowhere", "there is no nowhere"),
        ("model.path", "llama", "has no model_index.json"),
        ("data.source", "nowhere", "does not exist"),
        ("data.source", "empty", "no picture"),
    ):
        (error,) = errors_of(worker, base, {**given, key: value})
        assert error["key"] == key
        assert cause in error["cause"]
    words = {"data.captions.trigger": "/an old photo/", "data.captions.separator": "/"}
    assert errors_of(worker, base, {**given, **words}) == []


def test_a_form_has_each_key_once_and_the_values_of_its_base(worker: PlanWorker) -> None:
    form = worker.ask("form", {"base": config_base(worker, "tiny.yaml")})
    groups = [*form["groups"], *form["more"], {"fields": form["multi_gpu"]["fields"]}]
    keys = [field["key"] for group in groups for field in group["fields"]]
    assert len(keys) == len(set(keys))
    config = load_document(read_document(SOURCE / "models/tiny.yaml"), Tasks()).config
    optional = {"train.early_stop"}  # a section, whose fields have keys of their own
    assert set(flatten(config)) - optional <= set(keys)
    assert form["values"]["model.hidden_size"] == "32"
    assert form["values"]["data.prompts"] == "the "
    assert form["values"]["optimizer.lr"] == "0.0003"
    assert form["from"]["batch.samples"].startswith("tiny.yaml:5:")
    assert "optimizer.lr" not in form["from"]


def test_errors_stand_beside_their_fields(worker: PlanWorker) -> None:
    values = {
        "batch.samples": "many",
        "optimizer.lr": -1,
        "train.steps": "2eps",
        "devices.memory": "40 apples",
        "devices.strategy": "dpp",
        "data.source": "/etc/passwd",
    }
    errors = errors_of(worker, SMALL, values)
    assert {error["key"] for error in errors} == set(values)
    assert all(error["cause"] and error["remedy"] for error in errors)
    sizes = {"model.hidden_size": 36, "model.num_heads": 4}
    assert [e["key"] for e in errors_of(worker, SMALL, sizes)] == ["model.hidden_size"]
    assert [e["key"] for e in errors_of(worker, SMALL, {"devices.use": "7"})] == ["devices.use"]
    scale = {"schedule.scale_lr": "linear"}
    assert [e["key"] for e in errors_of(worker, SMALL, scale)] == ["schedule.scale_lr"]


def test_a_choice_between_yes_no_and_the_plans_own() -> None:
    fields = form_fields("language", "torch", {})
    choices = [choice["value"] for choice in fields.by_key["train.exact"].choices]
    assert choices == ["auto", "true", "false"]
    read = [read_values({"train.exact": choice}, fields)["train.exact"] for choice in choices]
    assert read == ["auto", True, False]


def test_yes_is_no_number() -> None:
    """It stays a text, which loading the config refuses: to Python, True is the number 1."""
    fields = form_fields("language", "torch", {})
    for key in ("train.steps", "optimizer.lr"):
        read = read_values({key: "true"}, fields)
        assert read == {key: "true"}


@pytest.mark.parametrize("task", built_in())
def test_the_text_of_each_control_stands_for_its_value(task: str) -> None:
    """What is shown is what is sent: a text that comes back unchanged gives the same value."""
    fields = form_fields(task, "torch", {})

    for key, field in fields.by_key.items():
        chosen = [read_values({key: one["value"]}, fields)[key] for one in field.choices]
        for value in [field.default, *chosen, *_VALUES.get(key, ())]:
            document = Document()
            document.set(key, value, "test")
            alone = FormFields([], [], [], {key: field})
            shown = shown_values(document, None, alone)[key]
            assert isinstance(shown, bool if field.kind == "switch" else str)
            read = read_values({key: shown}, fields)[key]
            assert (read, type(read)) == (value, type(value)), key
            if not field.is_section:
                assert apply_values(document, {key: read}, fields) == {}, key


_VALUES: Mapping[str, Sequence[object]] = {
    "train.seed": [2**62 + 1, 0],
    "optimizer.lr": [1e-5, 1e-20, 1, 0.1],
    "optimizer.betas": [[0.8, 1e-5]],
    "data.prompts": [["two\nlines", " the "], ["[x"], [""], ["a: b", "# c"], ["\u2028"], ["5"]],
    "data.source": ["a b.txt", ["a.txt", "b.txt"], ["a.txt"]],
    "data.mean": [[0.5, 1.0], [0.5]],
    "devices.balance": [[2, 1], "measured"],
    "optimizer.groups": [[{"match": "*.bias", "lr": 1e-5}]],
    "model.class_weights": [{"a": 2.0}, "balanced"],
    "train.save_every": [5, "2ep", "1.5min"],
    "devices.memory": ["40GiB", 5],
    "devices.use": ["0", "0,1", "cpu:2"],
    "train.best_metric": ["5", "a # b", "true"],
}


def test_what_a_number_is_not_stays_a_text_and_is_refused(worker: PlanWorker) -> None:
    base = config_base(worker, "tiny.yaml")
    texts = {"optimizer.lr": "1e400", "train.seed": "", "batch.samples": "8 # 9", "train.steps": ""}
    texts |= {"optimizer.betas": "", "devices.balance": ""}
    assert {error["key"] for error in errors_of(worker, base, texts)} == set(texts)


def test_the_plan_says_what_untouched_controls_show(worker: PlanWorker) -> None:
    """A default that follows from another value: muon's momentum is 0.95."""
    base = config_base(worker, "tiny.yaml")
    for optimizer, momentum in (("sgd", "0.9"), ("muon", "0.95")):
        answer = worker.ask("plan", {"base": base, "values": {"optimizer.name": optimizer}})
        assert answer["values"]["optimizer.momentum"] == momentum


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("ü", "ü"),
        ("u\u0308", "ü"),  # in two characters, as macOS writes a file's name
        ("первый опыт", "первый-опыт"),
        ("模型 2", "模型-2"),
        ("हिन्दी", "हिन्दी"),  # letters with marks
        ("../a/b\\c:d\n?e", "a-b-c-d-e"),
        (" lr 1e-3 ", "lr-1e-3"),
        ("", "of-the-base"),
    ],
)
def test_a_name_has_letters_of_any_language(typed: str, name: str) -> None:
    assert check_name(typed, "of-the-base") == name


@pytest.mark.parametrize("typed", ["/", "..", "🙂", "x" * 61, "𐐀" * 60])
def test_what_is_no_name(typed: str) -> None:
    with pytest.raises(UserError, match="can't be a name"):
        check_name(typed, "of-the-base")


def test_a_path_that_is_too_long_is_an_error_of_the_form(worker: PlanWorker) -> None:
    with pytest.raises(PlanRefusedError, match="File name too long: xxx") as refused:
        worker.ask("plan", {"base": SMALL, "values": {"data.source": "x" * 5000}})
    assert refused.value.errors[0]["remedy"] == "another path in the form"
    assert len(refused.value.errors[0]["cause"]) < 300


def test_the_plan_changes_with_the_batch(worker: PlanWorker) -> None:
    base = config_base(worker, "tiny.yaml")
    cards = {}
    for batch in (8, 12):
        answer = worker.ask("plan", {"base": base, "values": {"batch.samples": batch}})
        cards[batch] = {card["title"]: card["value"] for card in answer["blocks"][0]["items"]}
    assert cards[8]["Batch"] == "8 samples"
    assert cards[12]["Batch"] == "12 samples"


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"devices.use": "cpu:2", "batch.samples": 12, "data.prompts": ["it's", "a: b", "# c"]},
        {"optimizer.name": "muon", "optimizer.betas": [0.8, 0.99], "train.amp": True},
        {"batch.samples": None, "batch.per_device": 4, "batch.accumulate": 2},
        {"train.steps": "2ep", "devices.memory": "2GiB", "schedule.warmup": "0.5ep"},
        {"train.early_stop": True, "train.early_stop.patience": 2, "train.eval_every": 10},
    ],
)
def test_command_and_saved_file_give_the_same_config(
    worker: PlanWorker, root: Path, values: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The command line sets what the form sets, and the saved YAML says no more than it must."""
    monkeypatch.chdir(root)
    base = config_base(worker, "tiny.yaml")
    answer = worker.ask("plan", {"base": base, "values": values})
    assert answer["ok"], answer["errors"]
    started = worker.ask("start", {"base": base, "values": values, "name": "x"})
    verb = find_verb("train")
    flags = verb.make_context("train", list(started["arguments"][1:])).params
    typed = load_config(flags, say=False).config
    path = worker.ask("save", {"base": base, "values": values, "name": "saved"})["path"]
    text = (root / path).read_text()
    saved = load_document(read_document(root / path), Tasks()).config
    assert flatten(saved) == flatten(typed)
    assert text.startswith("# Made by `samecurve ui`")
    assert "task: language" in text
    assert "keep" not in text
    assert len(text.splitlines()) < 40


def test_a_run_is_repeated(worker: PlanWorker, root: Path) -> None:
    """A run's config names every value; what is saved names those that are no defaults."""
    config = load_document(read_document(root / "tiny.yaml"), Tasks()).config
    home = root / "runs" / "tiny-20260101-000000"
    home.mkdir(parents=True)
    (home / "config.yaml").write_text(dump_document(config.model_dump(mode="json")))
    (home / "plan.json").write_text("{}")
    run = next(r for r in worker.ask("bases", {})["runs"] if r["name"].endswith(home.name))
    request = {"base": {"kind": "run", "id": run["id"]}, "values": {"train.seed": 5}}
    answer = worker.ask("plan", request)
    assert answer["ok"], answer["errors"]
    assert answer["command"] == "samecurve train -f configs/tiny.yaml"
    path = root / worker.ask("save", request)["path"]
    assert "epsilon" not in path.read_text()
    assert len(path.read_text().splitlines()) < 25
    saved = load_document(read_document(path), Tasks()).config
    assert flatten(saved) == flatten(config.with_values(train={"seed": 5}))


def test_another_task_brings_its_own_fields(worker: PlanWorker) -> None:
    values = {"task": "timeseries", "optimizer.lr": 0.01}
    form = worker.ask("form", {"base": SMALL, "values": values})
    assert form["task"] == "timeseries"
    assert form["values"]["model.name"] == "resnet"
    assert form["values"]["optimizer.lr"] == "0.01"
    for task in ("language", "timeseries"):
        empty = {"kind": "empty", "id": task}
        assert worker.ask("form", {"base": empty, "values": {}})["task"] == task
    chat = {"kind": "preset", "id": "chat-24gb"}
    form = worker.ask("form", {"base": chat, "values": {"model.adapter": False}})
    assert form["values"]["model.adapter"] is False
    form = worker.ask("form", {"base": chat, "values": {"model.adapter.rank": 4}})
    assert (form["values"]["model.adapter"], form["values"]["model.adapter.rank"]) == (True, "4")


def test_a_file_with_other_content_is_never_overwritten(worker: PlanWorker, root: Path) -> None:
    base = config_base(worker, "tiny.yaml")
    paths = [
        worker.ask("save", {"base": base, "values": {"train.seed": seed}, "name": "twice"})["path"]
        for seed in (1, 2, 1)
    ]
    assert paths == ["configs/twice.yaml", "configs/twice-2.yaml", "configs/twice.yaml"]
    assert "seed: 1" in (root / paths[0]).read_text()
    for name in ("../out", "/etc/x", "a/../../b", "", "..", "x\0y"):
        path = "configs/none.yaml"
        with suppress(PlanRefusedError):
            path = worker.ask("save", {"base": base, "values": {}, "name": name})["path"]
        assert (root / path).resolve().parent == root / "configs"


def test_places_outside_of_the_roots_are_refused(
    worker: PlanWorker, root: Path, tmp_path: Path
) -> None:
    marker = tmp_path / "imported"
    (tmp_path / "own.py").write_text(f"open({str(marker)!r}, 'w')\nclass Mine: ...\n")
    (root / "link.py").symlink_to(tmp_path / "own.py")
    (root / "link").symlink_to(tmp_path)
    (root / "outside.yaml").write_text(f"task: {tmp_path}/own.py:Mine\nbatch: {{samples: 4}}\n")
    up = f"../{tmp_path.name}/own.py:Mine"
    for task in (f"{tmp_path}/own.py:Mine", "link.py:Mine", "link/own.py:Mine", up):
        for base in (SMALL, {"kind": "empty", "id": task}):
            errors = errors_of(worker, base, {"task": task})
            assert errors[0]["key"] == "task"
            assert "outside" in errors[0]["cause"]
    outside = errors_of(worker, config_base(worker, "outside.yaml"), {})
    assert outside[0]["key"] == "task"
    for source in (
        "/etc/*",
        "~/x",
        "../x.txt",
        "link",
        "link/*.txt",
        "a*/../../b",
        "~no user/x",
        '["/etc"]',
    ):
        errors = errors_of(worker, config_base(worker, "tiny.yaml"), {"data.source": source})
        assert errors[0]["key"] == "data.source", source
        assert "outside" in errors[0]["cause"]
    evil = root / "runs" / "evil"
    evil.mkdir(parents=True)
    (evil / "own.py").write_text((tmp_path / "own.py").read_text())
    (evil / "config.yaml").write_text("task: runs/evil/own.py:Mine\nbatch: {samples: 4}\n")
    (evil / "plan.json").write_text("{}")
    run = next(r for r in worker.ask("bases", {})["runs"] if r["name"].endswith("evil"))
    errors = errors_of(worker, {"kind": "run", "id": run["id"]}, {})
    assert "it came with the run" in errors[0]["cause"]
    (root / "task.pickle").write_bytes(b"cos\nsystem\n")
    errors = errors_of(worker, SMALL, {"task": "task.pickle:Mine"})
    assert "no session of yours" in errors[0]["cause"]
    assert not marker.exists()
    for module in ("os:path", "antigravity:Mine", "samecurve.api.process:Process"):
        assert errors_of(worker, SMALL, {"task": module})[0]["cause"]


def test_requests_that_name_nothing_are_refused(worker: PlanWorker) -> None:
    bases: list[Any] = [
        {"kind": "config", "id": "../../etc"},
        {"kind": "x", "id": ""},
        None,
        [],
        "x",
    ]
    for base in bases:
        errors = errors_of(worker, base, {})
        assert errors[0]["cause"]
    unknown: list[Any] = [{"no.such.key": 1}, {"model": {}}, {"__class__": 1}, [1], "x"]
    for values in unknown:
        errors = errors_of(worker, SMALL, values)
        assert errors[0]["cause"]


OWN = """\
import samecurve

print("loaded from a file of the user's")


class Mine:
    class Model(samecurve.Section):
        width: int = 8
        \"\"\"of the hidden layer\"\"\"

    def __init__(self, model, data):
        self.width = model.width

    def model(self):
        import torch
        return torch.nn.Linear(4, self.width)

    def train_data(self):
        import torch
        return torch.utils.data.TensorDataset(torch.zeros(40, 4))

    def loss(self, model, batch):
        out = model(batch[0])
        return samecurve.Mean((out ** 2).sum(), len(out))
"""


def test_a_users_own_task_shows_its_fields_and_is_read_anew(worker: PlanWorker, root: Path) -> None:
    own_task(root, "own", OWN)
    base = config_base(worker, "own.yaml")
    form = worker.ask("form", {"base": base})
    fields = {f["key"]: f for group in form["groups"] for f in group["fields"]}
    assert fields["model.width"]["help"] == "of the hidden layer"
    assert fields["model.width"]["kind"] == "integer"
    answer = worker.ask("plan", {"base": base, "values": {"model.width": 16}})
    assert answer["ok"], answer["errors"]
    (root / "own.py").write_text(
        OWN.replace("width: int = 8", "depth: int = 2\n        width: int = 8")
    )
    form = worker.ask("form", {"base": base})
    assert "model.depth" in {f["key"] for group in form["groups"] for f in group["fields"]}


@pytest.mark.long
def test_the_worker_survives_code_that_raises_ends_or_hangs(root: Path, cache: Path) -> None:
    del cache
    section = (
        "import samecurve\nclass Mine:\n    class Model(samecurve.Section):\n        n: int = 1\n"
    )
    own_task(root, "raises", f"{section}raise ValueError('no')\n")
    own_task(root, "leaves", f"{section}raise SystemExit(3)\n")
    own_task(root, "ends", f"{section}import os\nos._exit(3)\n")
    own_task(root, "waits", f"{section}import time\ntime.sleep(600)\n")
    worker = PlanWorker([root], patience=2.5, idle=0.5)
    try:
        for name in ("raises", "leaves", "ends", "waits"):
            base = config_base(worker, f"{name}.yaml")
            began = time.monotonic()
            try:
                errors = worker.ask("plan", {"base": base, "values": {}})["errors"]
            except PlanRefusedError as refused:
                errors = refused.errors
            assert errors[0]["cause"], name
            assert time.monotonic() - began < 8
            assert worker.ask("form", {"base": SMALL})["task"] == "language"
        pids = [worker.pid]
        time.sleep(1.0)
        pids.append(worker.pid)
        assert [pid is None for pid in pids] == [False, True]  # nobody has asked for a while
        assert worker.ask("form", {"base": SMALL})["task"] == "language"
    finally:
        worker.close()


@pytest.mark.long
def test_a_task_that_hangs_holds_up_few_requests_and_no_end(root: Path, cache: Path) -> None:
    """Requests that wait for the same task share its error; too many are refused at once."""
    del cache
    own_task(root, "loops", "class Mine:\n    def __init__(self):\n        while True: pass\n")
    worker = PlanWorker([root], patience=4.0)
    request = {"base": config_base(worker, "loops.yaml"), "values": {}}
    causes: list[str] = []
    seconds: list[float] = []

    def ask() -> None:
        began = time.monotonic()
        try:
            answer = worker.ask("plan", request)
            causes.append(answer["errors"][0]["cause"])
        except PlanRefusedError as refused:
            causes.append(refused.errors[0]["cause"])
        seconds.append(time.monotonic() - began)

    threads = [threading.Thread(target=ask) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert Counter(causes) == {
        "the plan took more than 4 s": 12,
        "12 other requests wait for their plans": 8,
    }
    assert max(seconds) < 8
    again = threading.Thread(target=ask)
    again.start()
    time.sleep(1.0)
    began = time.monotonic()
    worker.close()  # as the server ends
    again.join()
    assert time.monotonic() - began < 2
    with pytest.raises(PlanRefusedError, match="the server is ending"):
        worker.ask("plan", request)


def test_another_tools_config_is_converted(worker: PlanWorker, root: Path) -> None:
    text = (
        "model: {hidden_size: 32, num_layers: 1, num_heads: 2, vocab_size: 256, max_seq_len: 16}\n"
    )
    text += (
        "trainer: {learning_rate: 0.001, batch_size: 4, max_steps: 10}\ndata: {path: squares.txt}\n"
    )
    (root / "oxidizr.yaml").write_text(text)
    base = config_base(worker, "oxidizr.yaml")
    form = worker.ask("form", {"base": base})
    assert "Oxidizr" in form["notes"][0]
    assert form["values"]["optimizer.lr"] == "0.001"
    assert form["values"]["train.steps"] == "10"
