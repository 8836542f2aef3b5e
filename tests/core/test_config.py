"""A config is read strictly; every error has its place and, where there is one, the word that was
meant.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import Field

from generated_docs import generated_docs
from samecurve.cli.load_config import apply_batch
from samecurve.core.config import Section
from samecurve.core.config.document import dump_document, parse_document, parse_setting
from samecurve.core.config.json_schema import as_table, json_schema
from samecurve.core.config.loading import LoadedConfig, TaskSections, load_document
from samecurve.core.config.sections import DataSection
from samecurve.errors import InvalidConfigError, UserError
from samecurve.features.balance import balance_of
from samecurve.tasks import Tasks, built_in

ROOT = Path(__file__).parents[2]
LEAST = "batch: {samples: 8}\n"


def read(text: str, name: str = "c.yaml") -> LoadedConfig:
    return load_document(parse_document(text, name), Tasks(), "c")


@pytest.mark.parametrize(
    "path", sorted((ROOT / "models").glob("*.yaml")), ids=lambda path: path.stem
)
def test_the_example_configs_are_valid(path: Path) -> None:
    assert read(path.read_text()).config.task in built_in()


def test_every_error_at_once_with_its_place() -> None:
    text = (
        "batch: {samples: 0}\nmodel:\n  hiden_size: 3\noptimizer: {lr: fast}\ntrain: {steps: -1,"
        " precision: bf15}\ndevices: {strategy: zero3}\n"
    )
    with pytest.raises(InvalidConfigError) as caught:
        read(text)
    found = {error.where: error for error in caught.value.errors}
    places = ("1:9", "3:3", "4:13", "5:9", "5:20", "6:11")
    assert set(found) == {f"c.yaml:{place}" for place in places}
    assert found["c.yaml:3:3"].remedy == "did you mean hidden_size?"
    assert found["c.yaml:5:20"].remedy == "did you mean bf16?"
    assert found["c.yaml:6:11"].remedy == "`samecurve schema --table` says what each key takes"


@pytest.mark.parametrize("word", ["measured", "Measured"])
def test_a_value_of_an_earlier_version_is_read_with_a_line(word: str) -> None:
    """What other programs did to the machine decided whether a run was exact (measured)."""
    loaded = read(LEAST + f"train: {{exact: {word}}}\n")
    assert loaded.config.train.exact == "auto"
    assert loaded.notes == (
        "train.exact: measured is read as auto: no steps are timed before a run any more",
    )
    assert loaded.origins["train.exact"] == "c.yaml:2:9"
    assert read(LEAST + "train: {exact: auto}\n").notes == ()


def test_a_choice_of_words_and_switch_is_told_in_one_error() -> None:
    with pytest.raises(InvalidConfigError) as caught:
        read(LEAST + "train: {exact: sometimes}\n")
    (error,) = caught.value.errors
    assert error.cause == "train.exact: 'sometimes' is not one of auto, true, false"


def test_numbers_are_numbers() -> None:
    config = read(
        LEAST + "optimizer: {lr: 3e-4, clip: 1, betas: [0.9, 0.99]}\ntrain: {steps: 2ep}\n"
    ).config
    assert (
        config.optimizer.lr,
        config.optimizer.clip,
        config.optimizer.betas,
        config.train.steps,
    ) == (3e-4, 1.0, (0.9, 0.99), "2ep")
    assert parse_setting("optimizer.lr=1e-3") == ("optimizer.lr", 1e-3)
    assert parse_setting("data.prompts=[a, b]") == ("data.prompts", ["a", "b"])


def test_the_later_setting_wins_and_is_remembered() -> None:
    document = parse_document(LEAST + "optimizer: {lr: 1e-3}\n", "c.yaml")
    document.set("optimizer.lr", 2e-3, "--set optimizer.lr")
    document.set("train.steps", 7, "--max-steps")
    loaded = load_document(document, Tasks())
    assert loaded.config.optimizer.lr == 2e-3
    assert loaded.origins["optimizer.lr"] == "--set optimizer.lr"
    assert loaded.origins["batch.samples"] == "c.yaml:1:9"
    assert "train.seed" not in loaded.origins


def test_a_section_that_is_set_at_once_is_remembered_key_by_key() -> None:
    document = parse_document(LEAST + "model: {num_layers: 3}\n", "c.yaml")
    document.set("model", {"hidden_size": 64, "num_heads": 2}, "--set model")
    loaded = load_document(document, Tasks())
    assert loaded.origins["model.hidden_size"] == loaded.origins["model.num_heads"] == "--set model"
    assert not {"model", "model.num_layers"} & loaded.origins.keys()


def test_words_are_compared_without_regard_to_case() -> None:
    config = read(
        "task: Language\nbatch: {samples: 8}\nengine: Torch\ntrain: {precision: BF16}\n"
        "devices: {strategy: DDP, sync: NCCL, use: CPU:2, balance: Measured}\n"
        "schedule: {decay: Cosine}\ntrack: {wandb: Off}\n"
    ).config
    devices = config.devices
    assert (config.task, config.engine, config.train.precision) == ("language", "torch", "bf16")
    assert (devices.strategy, devices.sync, devices.use) == ("ddp", "nccl", "cpu:2")
    assert (balance_of(config), config.schedule.decay) == ("measured", "cosine")
    with pytest.raises(InvalidConfigError, match="did you mean nccl"):
        read(LEAST + "devices: {sync: NCL}\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("batch: {samples: 8", "not valid YAML"),
        ("- a\n- b\n", "mapping of sections"),
        ("batch: {samples: 8}\nbatch: {samples: 9}\n", "given twice"),
        ("batch: !!python/object/apply:os.system [true]\n", "has no meaning here"),
        (
            (
                "a: &a [1,1]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b,*b,*b,*b,*b]\nd:"
                " &d [*c,*c,*c,*c,*c,*c,*c,*c]\ne: &e [*d,*d,*d,*d,*d,*d,*d,*d]\nf:"
                " [*e,*e,*e,*e,*e]\n"
            ),
            "more than",
        ),
        ("a: &a [*a]\n", "more than"),
        ("[" * 5000, "nested deeper|not valid"),
        ("a: \x00\n", "not valid YAML"),
        ("task: visionn\n", "is not a task"),
        (
            "task: toy\n",
            (
                "tasks: language, diffusion, huggingface, timeseries, vision; your own:"
                " path/to/file.py:MyTask"
            ),
        ),
    ],
)
def test_broken_and_hostile_texts(text: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        read(text)


def test_what_is_written_is_read_back() -> None:
    values = {
        "data": {"source": "1e5", "prompts": ["3e-4", "010", "yes", "null", "naïve", "a: b", ""]},
        "optimizer": {"lr": 3e-4, "betas": [0.9, 0.95]},
        "model": {"vocab_size": None},
    }
    assert parse_document(dump_document(values), "c.yaml").value == values


def test_json_with_tabs() -> None:
    assert (
        read(
            '{\n\t"batch": {"samples": 8},\n\t"optimizer": {"lr": 1e-3}\n}', "c.json"
        ).config.batch.samples
        == 8
    )


@pytest.mark.parametrize(
    ("section", "flags", "becomes"),
    [
        ("{samples: 64}", {"per_device": 16}, {"per_device": 16}),
        ("{per_device: 4, accumulate: 2}", {"per_device": 16}, {"per_device": 16, "accumulate": 2}),
        ("{per_device: 4}", {"accumulate": 8}, {"per_device": 4, "accumulate": 8}),
        ("{per_device: 4, accumulate: 2}", {"samples": 32}, {"samples": 32}),
        ("{samples: 64}", {"per_device": 4, "samples": 32}, {"samples": 32, "per_device": 4}),
    ],
)
def test_batch_flags(section: str, flags: dict[str, int], becomes: dict[str, int]) -> None:
    document = parse_document(f"batch: {section}\n", "c.yaml")
    apply_batch(document, {f"batch.{key}": (value, "--flag") for key, value in flags.items()})
    assert load_document(document, Tasks()).config.batch.model_dump(exclude_none=True) == becomes


BATCH_4 = "--batch-size 4 sets 4 samples per device"
NOT_USED = "the config's batch of 16 samples (batch.samples) is not used"


@pytest.mark.parametrize(
    ("section", "flags", "line", "added", "left_out"),
    [
        (
            "{samples: 16}",
            {"--batch-size": 4},
            f"{BATCH_4}; {NOT_USED}. To keep 16: add --global-batch 16",
            "--global-batch",
            "",
        ),
        (
            "{samples: 16}",
            {"--batch-size": 4, "--grad-accum": 2},
            "--batch-size 4 --grad-accum 2 sets 4 samples per device, in each of 2 accumulation"
            f" steps; {NOT_USED}. To keep 16: --global-batch 16 in place of --grad-accum 2",
            "--global-batch",
            "--grad-accum",
        ),
        (
            "{samples: 16, per_device: 4}",
            {"--grad-accum": 2},
            "--grad-accum 2 sets 4 samples per device, in each of 2 accumulation steps;"
            f" {NOT_USED}. To keep 16: leave --grad-accum 2 out",
            "",
            "--grad-accum",
        ),
    ],
)
def test_flags_that_drop_the_configs_batch_say_so_and_what_keeps_it(
    section: str, flags: dict[str, int], line: str, added: str, left_out: str
) -> None:
    keys = {"--batch-size": "batch.per_device", "--grad-accum": "batch.accumulate"}
    keys["--global-batch"] = "batch.samples"
    text = f"batch: {section}\n"
    assert apply_batch(parse_document(text, "c.yaml"), typed_batch(keys, flags)) == line
    # what the line says keeps the config's batch
    kept = {flag: value for flag, value in flags.items() if flag != left_out}
    document = parse_document(text, "c.yaml")
    assert apply_batch(document, typed_batch(keys, kept | ({added: 16} if added else {}))) is None
    batch = load_document(document, Tasks()).config.batch
    assert (batch.samples, batch.per_device, batch.accumulate) == (16, 4, None)


def typed_batch(keys: dict[str, str], flags: dict[str, int]) -> dict[str, tuple[int, str]]:
    return {keys[flag]: (value, flag) for flag, value in flags.items()}


@pytest.mark.parametrize(
    "section", ["{}", "{samples: 8, per_device: 2, accumulate: 2}", "{accumulate: 2}"]
)
def test_batches_that_say_too_little_or_too_much(section: str) -> None:
    with pytest.raises(UserError, match="batch: "):
        read(f"batch: {section}\n")


def test_grad_accum_alone_needs_a_batch_per_device() -> None:
    with pytest.raises(UserError, match="needs a batch per device"):
        apply_batch(parse_document(LEAST, "c.yaml"), {"batch.accumulate": (4, "--grad-accum")})


def test_what_the_docs_have_from_the_code_is_current() -> None:
    """The schema, the table of keys, the tables of strategies: `make docs` writes them."""
    assert [path.name for path, text in generated_docs().items() if path.read_text() != text] == []


class Shape(Section):
    width: int = Field(4, description="of the toy")


class ToyModel(Section):
    shape: Shape = Shape()


def other_toy() -> type[Section]:
    class Shape(Section):
        depth: int = Field(2, description="of the other")

    class ToyModel(Section):
        shape: Shape = Shape()

    return ToyModel


class SeveralTasks(Tasks):
    """Two tasks beside ours, with sections of the same names."""

    def names(self) -> tuple[str, ...]:
        return ("language", "toy", "other/toy")

    def sections(self, task: str) -> TaskSections:
        models: dict[str, type[Section]] = {"toy": ToyModel, "other/toy": other_toy()}
        if task in models:
            return TaskSections(models[task], DataSection)
        return super().sections(task)


def refs_of(part: object) -> Iterator[str]:
    if isinstance(part, list):
        for item in part:
            yield from refs_of(item)
    if isinstance(part, dict):
        if "$ref" in part:
            yield part["$ref"]
        yield from refs_of(list(part.values()))


def test_the_schema_of_several_tasks_finds_what_it_refers_to() -> None:
    schema = json_schema(SeveralTasks())
    refs = list(refs_of(schema))
    assert {ref.removeprefix("#/$defs/") for ref in refs} == set(schema["$defs"])
    assert [name for name in schema["$defs"] if "Batch" in name] == ["Batch"]
    fields = {}
    for task in schema["anyOf"]:
        assert "$defs" not in task
        model = task["properties"]["model"]["$ref"].removeprefix("#/$defs/")
        name = task["properties"]["task"].get("const", "own")
        fields[name] = schema["$defs"][model].get("properties", {})
    assert "vocab_size" in fields.pop("language")
    assert fields.pop("own") == {}
    shapes = {
        task: set(schema["$defs"][model["shape"]["$ref"].removeprefix("#/$defs/")]["properties"])
        for task, model in fields.items()
    }
    assert shapes == {"toy": {"width"}, "other/toy": {"depth"}}


def test_the_table_of_several_tasks_says_what_they_share_once() -> None:
    common, *tables = as_table(SeveralTasks()).split("\n\n`task: ")
    assert "| `batch.samples` |" in common
    assert "| `data.prefetch` |" in common
    assert "`model." not in common
    assert [table.partition("`")[0] for table in tables] == ["language", "toy", "other/toy"]
    assert not any("`batch." in table or "`data.prefetch`" in table for table in tables)
    assert "| `model.shape.width` | whole number | `4` | of the toy |" in tables[1]
    assert "`model.shape.width`" not in tables[2]


def test_the_table_tells_sizes_from_epochs() -> None:
    table = as_table(Tasks())
    assert "\n| `devices.memory` | whole number or size (40GiB) |" in table
    assert "\n| `train.eval_every` | whole number or epochs (2ep) |" in table
    assert "\n| `train.save_every` | whole number or epochs (2ep) or minutes (10min) |" in table
