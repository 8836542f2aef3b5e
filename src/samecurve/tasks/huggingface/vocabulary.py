"""Whether the model knows the tokens of the data."""

from samecurve.errors import UserError
from samecurve.tasks.huggingface.task import HuggingFaceTask


def unknown_tokens(task: HuggingFaceTask, size: int, known: int) -> UserError:
    """The data, or the tokenizer of this size, has tokens that the model does not know."""
    prepared, path = task.prepared, task.fields.path
    if prepared.largest_at and prepared.largest_id >= known:
        return UserError(
            f"{prepared.largest_at} has the id {prepared.largest_id}; the model knows {known}"
            " tokens",
            "the model that these ids were made for, with model.vocab_size above them; or"
            f" data.token_dtype, if they are not {task.data.token_dtype}",
            "data.source",
        )
    assert prepared.tokenizer is not None
    remedy = f"of a model with random weights, --set model.vocab_size={size}"
    if path is not None and task.data.tokenizer is not None:
        remedy = "the model's own tokenizer: leave data.tokenizer out"
    elif path is not None:
        remedy = (
            "tokens were added to this tokenizer, and none to the model beside it: give it rows"
            f" for them (its resize_token_embeddings({size}), save_pretrained()), or take the"
            " tokenizer as it was"
        )
    return UserError(
        f"the model knows {known} tokens; the tokenizer {prepared.tokenizer.notes.name} has {size}",
        remedy,
        "data.tokenizer" if task.data.tokenizer else "model.path",
    )


def check_vocabulary_is_known(task: HuggingFaceTask) -> None:
    """UserError: ids alone don't say of how many."""
    fields = task.fields
    if (
        task.prepared.tokenizer is None
        and not fields.path
        and "vocab_size" not in fields.config_fields
    ):
        raise UserError(
            f"{task.data.sources[0].source} holds raw tokens; their vocabulary is not known",
            "--set model.vocab_size=N, or --set data.tokenizer=PATH of their tokenizer",
            "model.vocab_size",
        )
