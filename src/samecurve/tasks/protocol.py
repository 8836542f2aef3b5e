"""The members of a task's class, as people write it: ours, a user's, or an installed package's.

A task is a class without a base class. model(), loss() and train_data() are required (features()
with batch_loss() may take the place of loss()), and the rest of MEMBERS is optional. docs/tasks.md
shows their use. tasks/adapter fills in what a class leaves out, and checks what its methods return.

TaskMethods holds the members of one object, looked up once, when the task is opened. TaskEntry asks
the class, before there is an object, for Model, Data, data_stamp, other_data, plain_data and
first_weights.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from samecurve.core.feature_list import feature_members

OWN_MEMBERS: Mapping[str, str] = {
    "model": "model(self): the model, built anew at each call",
    "loss": (
        "loss(self, model, batch[, step][, epoch][, phase]) -> samecurve.Mean: the loss added over"
        " what was counted, and how much that was; step and epoch, if it asks for them, count from"
        ' 0. Or {"loss": Mean, name: Mean, ...}: the others are logged beside it'
    ),
    "train_data": (
        "train_data(self): a torch Dataset, or an object with __len__ and __getitem__(ids) ->"
        " {name: array with one row an id}"
    ),
    # data and evaluation
    "eval_data": "eval_data(self): held-out data, as train_data() gives it, or None",
    "test_data": (
        "test_data(self): held-out data that nothing is chosen by, as train_data() gives it, or"
        " None: the best checkpoint is measured on it, once, at the end"
    ),
    "collate": (
        "collate(self, samples[, ids][, epoch]) -> {name: array with one row a sample}: samples of"
        " unlike length, padded to the longest of their microbatch (torch)"
    ),
    "metrics": (
        "metrics(self, model, batch) -> {name: samecurve.Mean}: added over all devices and divided"
        " once; a sum may be an array of whole numbers (a confusion matrix); with `loss` among"
        " them, an evaluation runs the model once"
    ),
    "metric_names": (
        "metric_names = (...): what metrics() gives, where it should not be learnt from a row;"
        " {name: shape} where a sum is an array of counts, () for a number"
    ),
    "summarize": (
        "summarize(self, totals) -> {name: number or array}: what is shown of {name: Mean}, summed"
        " over all devices; each sum / weight, and arrays of counts as they are, if left out"
    ),
    # values, updates, what couples
    "initial": (
        "initial(self, name, shape) -> samecurve.Initial, or None for the module's own values"
    ),
    "init_module": (
        "init_module(self, model, module): gives the module's own parameters, which are empty,"
        " their first values with torch's functions, in place of initial(); of modules within each"
        " other the inner ones first. The model is then never held whole by a rank that holds a"
        " shard (torch)"
    ),
    "model_blocks": (
        "model_blocks(self, model) -> the modules that are sharded, compiled, run again in backward"
        " and moved one at a time, each called as a whole and none inside another; the elements of"
        " the outermost ModuleLists and Sequentials if left out (torch)"
    ),
    "optimizer": (
        "optimizer(self, params[, lr][, phase]) -> torch.optim.Optimizer over all of params"
    ),
    "elementwise": "elementwise = True: that optimizer updates each number by itself",
    "schedule": (
        "schedule(self, step) -> the factor of optimizer.lr at that step, counted from 0; or"
        " schedule(self, optimizer) -> a scheduler of torch.optim.lr_scheduler (torch): in place of"
        " the config's schedule"
    ),
    "coupled": (
        'coupled = ("contrastive loss",): words for what mixes the samples of a batch, beside'
        " BatchNorm, which is found"
    ),
    "frozen_base": (
        "frozen_base = True: what the model does not train comes from first_weights(), or from its"
        " own first values; checkpoints hold what is trained and a SHA-256 of the rest (torch)"
    ),
    "leave_out": (
        "leave_out(self, rows, real) -> rows that count nothing where real is False (jax): a"
        " microbatch is then computed as a whole instead of row by row"
    ),
    # what the plan knows
    "facts": (
        "facts(self) -> {field of samecurve.core.planning.facts.Facts: value}: what can't be found;"
        " with `arrays` (every parameter's shape) no model is built to be described"
    ),
    "fingerprint": "fingerprint(self) -> str: of the training data; another one is another run",
    "data_stamp": (
        "data_stamp(data[, model]), a staticmethod -> what the data, and the model, are made from,"
        " told cheaply (names, sizes, times of files): facts are kept until it changes"
    ),
    "prepare": (
        "prepare(self, device, part): makes files in the cache that rows need, before the first"
        " row is read: part is (number, of), and the parts of all ranks together make them all;"
        " yields (files that are there, files in all) at first, while it works and waits for other"
        " ranks, and ends when all are there"
    ),
    "Model": "class Model(samecurve.Section): the fields of the config's `model:` section",
    "Data": "class Data(samecurve.DataSection): the fields of the config's `data:` section",
    "other_data": (
        "other_data(source, assets, reference), a staticmethod -> {config key: value} by which all"
        " of another source is read (`eval -d`); data.source = source if left out"
    ),
    "plain_data": (
        "plain_data(), a staticmethod -> {config key: value} by which training data is read without"
        " its random changes (`eval --on train`)"
    ),
    # what a trained model is used for
    "sample": (
        "sample(self, model, seed[, part][, step][, prompt]) -> a list of texts, or of pictures"
        " (uint8 arrays): shown while it trains. seed: the run's, plus step. part: (number, of):"
        " samples number, number + of, ... are made here, the others by other ranks; each rank"
        " makes as many calls of the model as any other (torch). prompt: what `samecurve sample RUN"
        " --prompt TEXT` asks for; None in training"
    ),
    "respond": (
        "respond(self, model, prompt, *, tokens, temperature, seed) -> str: what"
        " `samecurve sample RUN --prompt TEXT` shows; with chat=None too, --chat and --no-chat"
    ),
    "assets": "assets(self) -> {file name: path}: kept in the run's directory, to use the model",
    "export": (
        "export(self, model, directory): writes what belongs beside the weights (a config, a"
        " tokenizer); may return lines for the user"
    ),
}

# what knows weights as other programs have them: what a run begins from, `export`, `--init-from`
WEIGHT_MEMBERS: Mapping[str, str] = {
    "export_hf": (
        "export_hf(self, tensors, directory, dtype) -> ({their name: tensor}, lines): writes what"
        " the Hugging Face libraries read beside the weights; gives those under their names, and"
        " lines for the user"
    ),
    "export_adapter": (
        "export_adapter(self, tensors, directory) -> ({their name: tensor}, lines): as export_hf(),"
        " of what is trained on a frozen base alone, as the peft library reads it"
    ),
    "exports": (
        'exports = {"diffusers": "a whole pipeline"}: other formats that `samecurve export'
        " --format` writes, each in words"
    ),
    "export_as": (
        "export_as(self, form, tensors, directory, dtype) -> samecurve.tasks.protocol.ExportedFile:"
        " writes what belongs beside the weights in one of `exports`; gives the weights under their"
        " names there"
    ),
    "export_format": 'export_format = "huggingface": what `samecurve export` writes unasked',
    "load_hf": (
        "load_hf(self, names) -> {their name: ours}: names of weights in the Hugging Face layout;"
        " what is left out is not needed"
    ),
    "first_weights": (
        "first_weights(model), a staticmethod -> the path of the weights that the model begins"
        " from, as --init-from names them; None: its own first values"
    ),
    "convert_weights": (
        "convert_weights(self, arrays) -> {name: array}: weights as others store them, as the model"
        " has them; each has dtype, shape and read(), none of whose values is read for it (torch)"
    ),
    "read_adapter": (
        "read_adapter(self, arrays, shapes, metadata) -> ({name: array}, lines): an adapter that"
        " another program has written (--init-from), by the names of the model's arrays, whose"
        " shapes are given; arrays as of convert_weights(); metadata: the texts in the file, and"
        " peft's adapter_config.json beside it (torch)"
    ),
    "unlike": (
        "unlike(self, fields) -> (fatal, differing): what else foreign weights say of their model,"
        " though their shapes fit"
    ),
}

# what a class may have: for every run; for weights as other programs have them; for features
MEMBERS: Mapping[str, str] = {**OWN_MEMBERS, **WEIGHT_MEMBERS, **feature_members()}


class ExportedFile(NamedTuple):
    """Weights as export_as() gives them."""

    file: str  # relative to the directory; several files get its name with numbers
    tensors: Mapping[str, Any]
    usage: str  # lines of Python that use the files; '': those that load the weights
    lines: Sequence[str] = ()  # for the user
    metadata: Mapping[str, str] = {}
    whole: bool = False  # never several files


Method = Callable[..., Any]  # bound to the task's object


def _none(*_: object) -> None:
    """No value: the default of a method that may give nothing."""


# What stands for a member that a class leaves out, where that is not None: the words of MEMBERS say
# what None stands for.
_DEFAULTS: Mapping[str, Any] = {
    **dict.fromkeys(("train_data", "eval_data", "test_data", "initial", "export"), _none),
    **dict.fromkeys(("facts", "assets"), dict),
    **dict.fromkeys(("metric_names", "coupled"), ()),
    **dict.fromkeys(("phases", "exports"), MappingProxyType({})),
    **dict.fromkeys(("elementwise", "frozen_base"), False),
    "export_format": "safetensors",
}


class TaskMethods:
    """The members of one object, as attributes. A method of the class is bound to its object."""

    def __init__(self, task: object) -> None:
        for name in MEMBERS:
            setattr(self, name, getattr(task, name, _DEFAULTS.get(name)))

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
