"""The huggingface task with PyTorch: the library's own model under every strategy."""

import copy
import inspect
import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from samecurve.core.evaluation import CLASS_WEIGHT
from samecurve.core.system.cache import keep_texts
from samecurve.seam import UserError
from samecurve.torch_engine.model.model_setup import unsaved_buffers_kept
from samecurve_products.lora import StoredArray
from samecurve_products.lora.adapter import merged
from samecurve_products.lora.names import BASE
from samecurve_products.lora.quantized import (
    PackedArrays,
    Packing,
    check_installed,
    describe_quantized,
    layer_packings,
    packed_formula,
    unpacked,
)
from samecurve_products.task_parts.classification import weigh_classes
from samecurve_products.text.huggingface.adapter import (
    adapter_tensors,
    add_adapter,
    describe_adapter,
    first_values,
    linear_layers,
    possible_adapters,
    read_adapter,
    separable,
    transposed_layers,
    with_adapter_names,
    write_config,
)
from samecurve_products.text.huggingface.causal import Causal, with_loss_head
from samecurve_products.text.huggingface.classify import Classify, say_classes
from samecurve_products.text.huggingface.costs import cost_facts
from samecurve_products.text.huggingface.data.labelled import prompted
from samecurve_products.text.huggingface.embed import Embed
from samecurve_products.text.huggingface.float64 import keep_float64
from samecurve_products.text.huggingface.library import (
    accepted_by_library,
    choose_attention,
    has_plain_head,
    longest_sequence,
    model_class,
    read_config,
)
from samecurve_products.text.huggingface.masked import Masked, Masking, make_masking
from samecurve_products.text.huggingface.model_directory import CONFIG
from samecurve_products.text.huggingface.model_limits import (
    check_length,
    check_packing,
    check_positions,
    check_vocabulary,
    check_vocabulary_is_known,
    is_recurrent,
    recurrent_kernels,
)
from samecurve_products.text.huggingface.router_balance import (
    BatchBalanced,
    RowBalanced,
    make_causal,
)
from samecurve_products.text.huggingface.sampling import continue_text
from samecurve_products.text.huggingface.sections import HFData, HFModel
from samecurve_products.text.huggingface.task import PROMPTS, HuggingFaceTask
from samecurve_products.text.huggingface.weights import from_files, to_files, with_new_head

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from samecurve_products.preview.about import AboutData


_LIBRARY_BYTES = 80 << 20  # memory of transformers and peft in a process
# objectives that answer no prompt: cause, remedy
_SILENT = {
    "masked": (
        "a masked language model fills in hidden tokens, and continues no text",
        "samecurve export, and the library's pipeline fill-mask",
    ),
    "embed": (
        "an encoder makes vectors of texts, and continues none",
        "samecurve export, and the library's AutoModel",
    ),
}


class TorchHuggingFace(HuggingFaceTask):
    """The objective's methods become the task's: loss(), metrics(); or features(), batch_loss()."""

    export_format = "huggingface"

    def __init__(
        self, model: HFModel, data: HFData, cache: Path, assets: Path | None = None
    ) -> None:
        if model.adapter is not None:  # without an adapter it is refused for that
            check_installed(model.quantize)
        super().__init__(model, data, cache, assets)
        self._class = model_class(self.config, model.objective)
        self._attention, self._attention_reason = choose_attention(
            model.attention, self._class, has_gpu=torch.cuda.is_available()
        )
        check_length(self.config, data)
        self._take_objective()

    def _masking(self) -> Masking:
        return make_masking(self.fields.mask_probability, self.tokenizer, self.config.vocab_size)

    def about_data(self) -> "AboutData":
        about = super().about_data()
        if self.fields.objective != "masked":
            return about
        return replace(about, loss_tokens=None, labels_of=Masked(self._masking()).labels)

    def _take_objective(self) -> None:
        """Make the objective's methods this task's own."""
        objective: Causal | Classify | Masked | Embed
        if self.classifies:
            objective, self._balance = Classify(self._class_weights()), ""
        elif self.fields.objective == "masked":
            objective, self._balance = Masked(self._masking()), ""
        elif self.fields.objective == "embed":
            objective, self._balance = Embed(self.fields.embedding), ""
        else:
            objective, self._balance = make_causal(self.fields, self.config, packed=self.packed)
        self._takes_all_logits = isinstance(objective, RowBalanced)
        if isinstance(objective, Causal | Masked):  # a classifier's counts are arrays
            self.metric_names = objective.metric_names
        if not isinstance(objective, Embed):
            self.metrics = objective.metrics
        if isinstance(objective, BatchBalanced | Embed):
            self.features, self.batch_loss = objective.features, objective.batch_loss
        else:
            self.loss = objective.loss

    @property
    def _class_names(self) -> list[str]:
        """Names of the classes, in the order of their numbers."""
        names: Mapping[Any, str] = self.config.id2label or {}
        return list(names.values())

    def _class_weights(self) -> list[float]:
        if self._kept is not None:  # the model is used, not trained
            return [1.0] * len(self._class_names)
        counts = self.prepared.class_counts
        return weigh_classes(self.fields.class_weights, self.prepared.classes, counts)

    @cached_property
    def config(self) -> "PretrainedConfig":
        """The library's config. The vocabulary has the tokenizer's size where the fields give none.

        UserError: the tokenizer has tokens that the model does not know.
        """
        if self._kept is not None or self.data.is_random:
            return read_config(self.fields, self._kept)
        size = self.prepared.vocab_size
        check_vocabulary_is_known(self)
        config = read_config(self.fields, vocab_size=size)
        check_vocabulary(self, size, config.vocab_size)
        if self.fields.objective != "causal":
            assert self.prepared.tokenizer is not None
            config.pad_token_id = self.prepared.tokenizer.pad
        if self.classifies:
            self._name_classes(config)
        return config

    def _name_classes(self, config: Any) -> None:
        """Write the classes into the library's config."""
        config.id2label = dict(enumerate(self.prepared.classes))
        config.label2id = {name: number for number, name in config.id2label.items()}
        config.architectures = [model_class(config, self.fields.objective).__name__]
        config.problem_type = "single_label_classification"

    def model(self) -> nn.Module:
        from transformers.utils.output_capturing import maybe_install_capturing_hooks

        built = self._plain_model()
        if self.fields.adapter is not None:
            add_adapter(built, self.fields.adapter, self.fields.quantize)
        # otherwise the library does it in the first forward pass, which a trial undoes
        maybe_install_capturing_hooks(built.base_model)
        if self.packed:
            check_packing(built, self._class.__name__)
        check_positions(built, self.data.seq_len)
        if self.fields.objective == "causal" and _has_fusible_head(built):
            with_loss_head(built)
        keep_float64(built)
        module: nn.Module = built
        return module

    def _plain_model(self) -> Any:
        """The library's model, without adapter and without our head."""
        options: dict[str, Any] = {}
        if "add_pooling_layer" in inspect.signature(self._class.__init__).parameters:
            options["add_pooling_layer"] = False  # no objective here trains it
        return self._class._from_config(  # noqa: SLF001 - what AutoModel.from_config calls
            self.config, dtype=torch.float32, attn_implementation=self._attention, **options
        )

    def init_module(self, model: Any, module: nn.Module) -> None:
        """Set a module's first values, by the library's rules or the adapter's."""
        with unsaved_buffers_kept(module):  # Gemma's rule sets a scale that is a buffer
            first_values(model, module)

    def convert_weights(self, arrays: Mapping[str, StoredArray]) -> Mapping[str, StoredArray]:
        """A directory's arrays as the model holds them. A missing head gets new values."""
        outline = self._outline()
        converted = from_files(outline, arrays)
        if self.fields.objective == "embed":
            known = outline.state_dict()  # not the heads of the model that wrote them
            return {name: array for name, array in converted.items() if name in known}
        if self.fields.objective != "causal":
            converted = with_new_head(outline, converted)
        adapter = self.fields.adapter
        if adapter is None:
            return converted
        packings = self._packings(outline)
        packer = PackedArrays(packings)
        rounded = packer.rounded(converted)
        converted = with_adapter_names(outline, adapter, converted, rounded)
        return packer.packed(converted, BASE)

    def read_adapter(
        self,
        arrays: Mapping[str, StoredArray],
        shapes: Mapping[str, tuple[int, ...]],
        metadata: Mapping[str, str],
    ) -> tuple[Mapping[str, StoredArray], list[str]]:
        """An adapter's file by the names of the model's arrays, and lines for the user."""
        assert self.fields.adapter is not None
        return read_adapter(self._outline(), self.fields.adapter, arrays, shapes, metadata)

    def _packings(self, outline: Any) -> dict[str, Packing]:
        """The packing of each packed layer, by name. outline: the plain model."""
        if self.fields.quantize == "none":
            return {}
        return layer_packings(linear_layers(outline), self.fields.quantize)

    def assets(self) -> Mapping[str, Path]:
        """Tokenizer and config, so that a run can be used without the model's directory."""
        texts = {
            CONFIG: self.config.to_json_string(use_diff=False),
            PROMPTS: json.dumps({"chat": self.takes_turns}),
        }
        kept = keep_texts(self._cache / "huggingface" / "configs", texts)
        return {**kept, **self._tokenizer_assets()}

    def export_hf(
        self, tensors: Mapping[str, torch.Tensor], directory: Path, dtype: str
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Export tensors under save_pretrained()'s names, with config and tokenizer beside them."""
        config = copy.deepcopy(self.config)
        config.dtype = dtype
        config.architectures = [self._class.__name__]
        config.save_pretrained(directory)
        lines = self._write_tokenizer(directory)
        self._copy_beside(directory)
        outline = self._outline()
        if self.fields.adapter is not None:
            if packings := self._packings(outline):
                tensors = unpacked(tensors, packings, BASE)
                lines.append(
                    f"merged into the base as it was trained on, its {self.fields.quantize} weights"
                    f" written as {dtype}"
                )
            tensors = merged(tensors, self.fields.adapter, transposed_layers(outline))
        return to_files(outline, tensors), lines

    def _write_tokenizer(self, directory: Path) -> list[str]:
        """Write the tokenizer as AutoTokenizer reads it. Returns lines for the user."""
        if self.tokenizer is None:
            return ["no tokenizer is written: the run was trained on ids alone"]
        return self.tokenizer.write(directory, longest_sequence(self.config))

    def export_adapter(
        self, tensors: Mapping[str, torch.Tensor], directory: Path
    ) -> tuple[dict[str, torch.Tensor], list[str]]:
        """Export adapter tensors under the names of peft's save_pretrained(), with its config.

        UserError: there is no adapter, or no directory that it is for.
        """
        adapter, home = separable(self.fields, classifies=self.classifies)
        write_config(self._outline(), adapter, home, directory)
        lines = self._write_tokenizer(directory)
        if self.fields.quantize in {"8bit", "4bit"}:
            lines.append(
                f"trained on the base in {self.fields.quantize}: on the base itself its answers"
                " differ a little"
            )
        return adapter_tensors(tensors), lines

    def respond(
        self,
        model: Any,
        prompt: str,
        *,
        tokens: int,
        temperature: float,
        seed: int,
        chat: bool | None = None,
    ) -> str:
        """The model's answer to a prompt.

        chat: the prompt is a turn of a conversation; None: as in the training data.
        UserError: the run has no tokenizer, or its objective answers no prompts.
        """
        if self.tokenizer is None:
            raise UserError(
                "this run has no tokenizer: its tokens were random, or raw ids, which stand for no"
                " text",
                "train with data.tokenizer",
                "RUN",
            )
        if self.fields.objective in _SILENT:
            raise UserError(*_SILENT[self.fields.objective], "RUN")
        if self.classifies:
            rows = prompted(prompt, self.tokenizer, self.data.seq_len)  # two texts: a tab between
            return say_classes(model, rows, self._class_names)
        if chat and self.tokenizer.notes.chat_template is None:
            raise UserError(
                "this run's tokenizer has no chat template", "leave --chat out", "--chat"
            )
        return continue_text(
            model,
            self.tokenizer,
            prompt,
            tokens=tokens,
            temperature=temperature,
            seed=seed,
            is_chat=self.takes_turns if chat is None else chat,
            longest=longest_sequence(self.config),
        )

    def sample(self, model: Any, seed: int) -> list[str]:
        """The config's prompts, each with the model's continuation."""
        if self.tokenizer is None or self.fields.objective in _SILENT:
            return []
        count = self.data.sample_tokens
        return [
            self.respond(model, prompt, tokens=count, temperature=0.8, seed=seed)
            for prompt in self.data.prompts
        ]

    def _outline(self) -> Any:
        """The plain model without values, on the meta device."""
        with torch.device("meta"):
            return accepted_by_library(self._plain_model, self._class.__name__)

    def facts(self) -> Mapping[str, Any]:
        fields, outline = self.fields, self._outline()
        library = f"{self._class.__name__} of transformers {version('transformers')}"
        attention = f"attention {self._attention}: {self._attention_reason}"
        notes = [f"{library}; {attention}"]
        notes += [self._balance] if self._balance else []
        adapters: Mapping[str, int] = {}
        if fields.adapter is not None:
            notes.append(describe_adapter(outline, fields.adapter))
        elif fields.objective in {"causal", "classify"}:
            adapters = possible_adapters(outline)
        packings = self._packings(outline)
        if packings:
            notes.append(describe_quantized(packings, fields.quantize))
        notes += [f"data {line}" for line in self.prepared.lines]
        if is_recurrent(outline):
            notes.append(recurrent_kernels())
        reference = dict(self.prepared.reference)
        if self.classifies:
            pairs = zip(self.prepared.classes, self._class_weights(), strict=True)
            reference |= {f"{CLASS_WEIGHT}{name}": weight for name, weight in pairs}
        costs = cost_facts(
            self.model,
            self.config,
            self.data.seq_len,
            self.prepared.texts,
            packed=self.packed,
            all_logits=self._takes_all_logits,
        )
        if packings:
            formula = packed_formula(packings, fields.quantize)
            costs["formulas"] = {**costs["formulas"], "packed": formula}
        return {
            **costs,
            "tokens_per_sample": self.prepared.texts * self.data.seq_len,
            "adapters": adapters,
            "library_bytes": _LIBRARY_BYTES,
            "narrow_only": "model.attention flash" if fields.attention == "flash" else "",
            "notes": tuple(notes),
            "reference": reference,
        }


def _has_fusible_head(model: Any) -> bool:
    head = model.get_output_embeddings()
    plain = type(head) is nn.Linear and head.bias is None
    return plain and has_plain_head(type(model).forward)
