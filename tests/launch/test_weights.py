"""Weights out of a run and into another: what comes out is what was trained, and what goes in is
what was given, on any devices and under each engine.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import samecurve
from commands import refused, write_config
from samecurve.errors import UserError
from samecurve.run.export_weights import convert_tensor, export
from samecurve.run.weights.initial_weights import read_initial_weights
from samecurve.tasks import entry_of, open_task
from samecurve_products.text.language import LanguageModel
from samecurve_products.text.language.llama_files import hf_name
from samecurve_products.text.language.torch_task import Decoder
from starts import begun_from, start, train, values
from tiny import config_of
from worlds import Pool

GB = 10**9


@pytest.fixture(scope="module")
def source(pool: Pool, corpus: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 6 steps in f64, evaluated at its end."""
    home = tmp_path_factory.mktemp("source") / "run"
    train(pool, start(home, values(corpus, train={"steps": 6}, data={"eval_samples": 8}), cache))
    return home


def test_transformers_loads_an_export_with_equal_logits_and_tokens(
    source: Path, tmp_path: Path
) -> None:
    """Their norms compute in float32 whatever the model's type, so 1e-6 is what can be asked."""
    transformers = pytest.importorskip("transformers")
    made = export(source, tmp_path / "out", "huggingface", "f32", GB)
    assert (made.step, made.arrays, made.files, made.notes) == (6, 21, 1, [])
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info.values())
    ids = torch.arange(48).view(3, 16) * 5
    with torch.no_grad():
        torch.testing.assert_close(
            theirs(ids).logits.double(), samecurve.load(source)(ids), rtol=0, atol=1e-6
        )
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", model_max_length=None)
    text = "naïve \0 <0x41>\n\n  日本"
    assert tokenizer(text)["input_ids"] == list(text.encode())
    assert tokenizer.decode(list(b"\xff abc \xe6\x97")) == b"\xff abc \xe6\x97".decode(
        "utf-8", "replace"
    )


@pytest.mark.parametrize(
    "layout",
    [
        "single:1",
        "dp:2",
        "ddp:2",
        "fsdp:3",
        *(pytest.param(layout, marks=pytest.mark.long) for layout in ("hsdp:4", "jax-fsdp:2")),
    ],
)
def test_a_run_begins_with_the_weights_it_was_given(
    *, layout: str, source: Path, pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    """From each of the formats in turn; its first loss is that of the source's model on its first
    batch.
    """
    given = tmp_path / "given"
    form = {
        "single:1": "huggingface",
        "ddp:2": "safetensors",
        "fsdp:3": "shards",
        "jax-fsdp:2": "huggingface",
    }.get(layout, "run")
    if form == "run":
        given = source
    else:
        export(
            source,
            given,
            form.replace("shards", "safetensors"),
            None,
            40_000 if form == "shards" else GB,
        )
        assert (given / "model.safetensors").exists() == (form != "shards")
    begun = start(tmp_path / "run", values(corpus, layout), cache, given)
    loss = train(pool, begun)[0]
    task, model = open_task(config_of(values(corpus)), str(cache)), samecurve.load(source)
    rows = {
        name: torch.from_numpy(np.asarray(array))
        for name, array in task.train_data()[begun.plan.order.ids(range(1))[0]].items()
    }
    with torch.no_grad():
        mean = task.loss(model, rows)
    assert loss == pytest.approx(float(mean.sum / mean.weight), rel=1e-12)
    assert begun_from(tmp_path / "run") == str(given)


def test_killed_before_its_first_save_a_run_begins_with_the_same_weights_again(
    source: Path, corpus: Path, cache: Path, tmp_path: Path, pool: Pool
) -> None:
    """Its source is gone by then, or another; a run that began otherwise takes none."""
    shutil.copytree(source, tmp_path / "source")
    run = tmp_path / "run"
    first = start(run, values(corpus), cache, tmp_path / "source")
    shutil.rmtree(tmp_path / "source")
    again = start(run, values(corpus), cache, tmp_path / "source")
    without = start(run, values(corpus), cache)
    assert (
        first.attempt.weights
        == again.attempt.weights
        == without.attempt.weights
        == str(run / "initial")
    )
    with pytest.raises(UserError, match="it can't begin again from"):
        start(run, values(corpus), cache, source)
    train(pool, again)
    more = values(corpus, train={"steps": 2})
    gone_on = start(run, more, cache, tmp_path / "source")
    assert gone_on.attempt.weights is None
    assert "has no effect any more" in (run / "journal.jsonl").read_text()
    other = tmp_path / "other"
    start(other, values(corpus), cache)
    with pytest.raises(UserError, match="did not begin from weights that were given to it"):
        start(other, values(corpus), cache, source)
    with pytest.raises(UserError, match="one of --resume and --init-from"):
        start(tmp_path / "third", values(corpus), cache, source, resume=str(run))
    copy = next((run / "initial").glob("*.safetensors"))
    copy.write_bytes(copy.read_bytes()[:-1] + b"\x55")
    shutil.rmtree(run / "checkpoints")
    with pytest.raises(UserError, match="does not match its hash"):
        start(run, values(corpus), cache)


def pickled(source: Path, path: Path, wrap: Callable[[dict[str, Any]], object]) -> Path:
    torch.save(wrap(samecurve.load(source).state_dict()), path)
    return path


@pytest.mark.parametrize(
    ("wrap", "says"),
    [
        (lambda state: state, ""),
        (
            lambda state: {f"module.{name}": value for name, value in state.items()},
            "taken off their names: module.",
        ),
        (
            lambda state: {
                "epoch": 3,
                "model_state_dict": {
                    f"module._orig_mod.{name}": value.bfloat16() for name, value in state.items()
                },
            },
            'under "model_state_dict"; left out: epoch',
        ),
        (
            lambda state: {
                name.replace("layers.0.", "layers.0._orig_mod."): value
                for name, value in state.items()
            },
            "_orig_mod. within names",
        ),
        (
            lambda state: {
                **{hf_name(name): value.half() for name, value in state.items()},
                "model.rotary_emb.inv_freq": torch.ones(4),
            },
            "21 arrays of float16 become float64",
        ),
    ],
)
def test_a_pickled_state_dict_is_taken_under_the_names_that_wrappers_gave_it(
    *,
    wrap: Callable[[dict[str, Any]], object],
    says: str,
    source: Path,
    corpus: Path,
    cache: Path,
    tmp_path: Path,
) -> None:
    found = read_initial_weights(
        pickled(source, tmp_path / "weights.pt", wrap),
        config_of(values(corpus)),
        entry_of("language").facts(config_of(values(corpus)), str(cache)),
    )
    assert says in "; ".join(found.notes)
    for name, value in samecurve.load(source).named_parameters():
        rounded = {"bfloat16": value.bfloat16, "float16": value.half, "float64": value.double}[
            found.arrays[name].dtype
        ]()
        np.testing.assert_array_equal(found.arrays[name].read(), rounded.detach().double().numpy())


class Other:
    """What a pickle could run."""


def cut(write: Callable[..., object], state: object, path: Path) -> None:
    write(state, path)
    path.write_bytes(path.read_bytes()[:5000])


REFUSED: dict[str, tuple[str, Callable[[dict[str, Any], Path], object], str]] = {
    "a key less": (
        "w.pt",
        lambda state, path: torch.save(
            {name: value for name, value in state.items() if "norm" not in name}, path
        ),
        "5 missing (layers.0.input_layernorm.weight,",
    ),
    "a key more": (
        "w.safetensors",
        lambda state, path: save_file({**state, "extra": torch.ones(1)}, path),
        "1 unexpected (extra)",
    ),
    "another shape": (
        "w.safetensors",
        lambda state, path: save_file({**state, "norm.weight": torch.ones(31)}, path),
        "1 of another shape (norm.weight [31], here [32])",
    ),
    "any object": (
        "w.pt",
        lambda state, path: torch.save({"model": state, "made by": Other()}, path),
        "is more than weights, and nothing else is loaded from a pickle",
    ),
    "cut off": ("w.safetensors", lambda state, path: cut(save_file, state, path), "can't be read"),
    "cut off too": ("w.pt", lambda state, path: cut(torch.save, state, path), "can't be read"),
    "no pickle": (
        "w.pt",
        lambda _state, path: path.write_bytes(b"\x80\x02junk"),
        "w.pt can't be read",
    ),
    "no weights": (
        "w.pt",
        lambda _state, path: torch.save([1, 2], path),
        "holds no single state dict: it is of type list",
    ),
    "integers": (
        "w.pt",
        lambda state, path: torch.save({name: value.long() for name, value in state.items()}, path),
        "no floating values in",
    ),
    "not finite": (
        "w.pt",
        lambda state, path: torch.save(
            {**state, "norm.weight": torch.full((32,), torch.nan)}, path
        ),
        "norm.weight has values that are not finite",
    ),
    "text": (
        "w.txt",
        lambda _state, path: path.write_text("hello"),
        "is no file of weights, by its name",
    ),
    "nothing": ("w.pt", lambda _state, _path: None, "there is no w.pt"),
    "a directory": ("w", lambda _state, path: path.mkdir(), "w has no model.safetensors"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_before_anything_is_written(
    *,
    what: str,
    source: Path,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    name, write, says = REFUSED[what]
    write(samecurve.load(source).state_dict(), tmp_path / name)
    config = write_config(tmp_path, corpus)
    before = {path.name for path in tmp_path.iterdir()}
    assert says in refused(
        monkeypatch,
        capsys,
        "train",
        "-f",
        config,
        "--init-from",
        name,
        "--save-dir",
        "run",
        cwd=tmp_path,
    )
    assert {path.name for path in tmp_path.iterdir()} == before


def test_weights_of_another_model_whose_shapes_fit_are_refused(
    source: Path, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    config = config_of(values(corpus, model={"num_heads": 2, "kv_heads": 1}))
    export(source, tmp_path / "out", "huggingface", None, GB)
    for given in (source, tmp_path / "out"):
        with pytest.raises(UserError, match="num_heads 4, here 2"):
            read_initial_weights(given, config, entry_of(config.task).facts(config, str(cache)))
    theirs = json.loads((tmp_path / "out/config.json").read_text())
    (tmp_path / "out/config.json").write_text(
        json.dumps({**theirs, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5}})
    )
    (tmp_path / "out/config.yaml").unlink()
    config = config_of(values(corpus))
    with pytest.raises(UserError, match="rope llama3: not what this decoder computes"):
        read_initial_weights(
            tmp_path / "out", config, entry_of(config.task).facts(config, str(cache))
        )
    slower = config_of(values(corpus, model={"rope_theta": 5e5}))
    assert (
        "the weights were trained otherwise: rope_theta 10000.0, here 500000.0"
        in read_initial_weights(
            source, slower, entry_of("language").facts(slower, str(cache))
        ).notes
    )


def test_an_export_is_whole_or_not_there_and_overwrites_nothing(
    source: Path, tmp_path: Path
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine").write_text("kept")
    with pytest.raises(UserError, match="holds something"):
        export(source, tmp_path / "full", "safetensors", None, GB)
    (tmp_path / "empty").mkdir()
    made = export(
        source / "checkpoints/step-00000006", tmp_path / "empty", "safetensors", "bf16", 20_000
    )
    assert (made.dtype, made.files, made.arrays_left_out) == ("bfloat16", 4, 43)
    places = json.loads((tmp_path / "empty/model.safetensors.index.json").read_text())["weight_map"]
    for name, value in samecurve.load(source).state_dict().items():
        torch.testing.assert_close(
            load_file(tmp_path / "empty" / places[name])[name], value.bfloat16(), rtol=0, atol=0
        )
    with pytest.raises(UserError, match="norm has values beyond the range of float16"):
        convert_tensor("norm", torch.tensor([1.0, 1e5]), "float16")
    assert {path.name for path in tmp_path.iterdir()} == {"full", "empty"}


def test_tied_embeddings_are_one_array_there_and_back(
    pool: Pool, corpus: Path, cache: Path, tmp_path: Path
) -> None:
    tied = values(corpus, model={"tie_embeddings": True}, data={"tokenizer": "bpe:300"})
    train(pool, start(tmp_path / "run", tied, cache))
    config = config_of(tied)
    for form, names in (("huggingface", 20), ("safetensors", 21)):
        assert export(tmp_path / "run", tmp_path / form, form, None, GB).arrays == names
        found = read_initial_weights(
            tmp_path / form, config, entry_of(config.task).facts(config, str(cache))
        )
        assert len(found.arrays) == 20
    assert isinstance(config.model, LanguageModel)
    model = Decoder(config.model, 300).double()
    model.load_state_dict(load_file(tmp_path / "safetensors/model.safetensors"))
    torch.testing.assert_close(
        model.state_dict(), samecurve.load(tmp_path / "run").state_dict(), rtol=0, atol=0
    )
    state = load_file(tmp_path / "safetensors/model.safetensors")
    save_file(
        {**state, "lm_head.weight": state["lm_head.weight"] + 1}, tmp_path / "untied.safetensors"
    )
    with pytest.raises(UserError, match="this model has one array for both"):
        read_initial_weights(
            tmp_path / "untied.safetensors", config, entry_of(config.task).facts(config, str(cache))
        )


def test_a_model_of_ones_own_goes_out_and_in_whole(pool: Pool, cache: Path, tmp_path: Path) -> None:
    """Complex, frozen and tied weights, a buffer with infinities: by the module's own names, and
    back into another run on two devices.
    """
    own = {
        "task": f"{Path(__file__).parent}/everything.py:Everything",
        "batch": {"samples": 8},
        "train": {"steps": 1},
        "devices": {"use": "cpu"},
    }
    train(pool, start(tmp_path / "run", own, cache))
    made = export(tmp_path / "run", tmp_path / "out", "safetensors", None, GB)
    model = samecurve.load(tmp_path / "run")
    assert not model.training
    other = type(model)()
    other.load_state_dict(load_file(tmp_path / "out/model.safetensors"))
    assert made.arrays == 5
    for name, value in other.state_dict().items():
        torch.testing.assert_close(value, model.state_dict()[name], rtol=0, atol=0, msg=name)
    with pytest.raises(UserError, match=r"its class has no export_hf\(\)[\s\S]*write export_hf"):
        export(tmp_path / "run", tmp_path / "hf", "huggingface", None, GB)
    state = load_file(tmp_path / "out/model.safetensors")
    torch.save(
        {f"module.{name}": value for name, value in state.items() if name != "mask"},
        tmp_path / "w.pt",
    )
    begun = start(
        tmp_path / "on",
        {**own, "devices": {"use": "cpu:2", "preflight": 0}},
        cache,
        tmp_path / "w.pt",
    )
    assert (
        "not among the weights, so as the model has them: mask"
        in (tmp_path / "on/journal.jsonl").read_text()
    )
    rows = {
        "x": torch.from_numpy(
            open_task(config_of(own), str(cache)).train_data()[begun.plan.order.ids(range(1))[0]][
                "x"
            ]
        )
    }
    with torch.no_grad():
        expected = float((model(rows["x"]) - rows["x"]).square().sum() / 8)
    assert train(pool, begun)[0] == pytest.approx(expected, rel=1e-5)


@pytest.mark.long
def test_a_flax_model_of_ones_own_goes_out_and_in(pool: Pool, cache: Path, tmp_path: Path) -> None:
    pool.run(1, flax_round_trip, tmp_path, cache)


def flax_round_trip(_index: int, group: object, home: Path, cache: Path) -> None:
    """In a rank: jax lives there."""
    import jax
    from flax import nnx

    from samecurve.worker.jobs.train_job import rehearse

    example = Path(__file__).parents[2] / "examples/fft_jax.py:Spectral"
    own = {
        "task": str(example),
        "engine": "jax",
        "model": {"width": 4, "depth": 1},
        "data": {"samples": 24},
        "batch": {"samples": 8},
        "train": {"steps": 1},
        "devices": {"use": "cpu"},
    }
    rehearse(0, group, start(home / "run", own, cache).attempt.to_json())
    export(home / "run", home / "out", "safetensors", None, GB)
    model = samecurve.load(home / "run")
    weights = load_file(home / "out/model.safetensors")
    parameters = {
        ".".join(map(str, path)): leaf
        for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))
    }
    assert set(parameters) == set(weights)
    assert parameters["blocks.0.filter"][...].dtype == jax.numpy.complex64
    for name, leaf in parameters.items():
        np.testing.assert_array_equal(np.asarray(leaf[...]), weights[name].numpy())
    config = config_of(own)
    found = read_initial_weights(
        home / "out", config, entry_of(config.task).facts(config, str(cache))
    )
    assert found.arrays["blocks.0.filter"].shape == (16, 9, 4, 2)
    assert start(home / "on", own, cache, home / "out").attempt.weights
