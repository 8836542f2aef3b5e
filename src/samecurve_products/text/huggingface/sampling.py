"""Text from a trained model, by the library's generation with a cache; a seed draws the tokens."""

from typing import Any

import numpy as np
import torch

from samecurve.seam import UserError
from samecurve_products.text.huggingface.data.text_tokenizer import TextTokenizer
from samecurve_products.text.language.task import draw_token


def continue_text(
    model: Any,
    tokenizer: TextTokenizer,
    prompt: str,
    *,
    tokens: int,
    temperature: float,
    seed: int,
    is_chat: bool,
    longest: int | None,
) -> str:
    """The prompt and its continuation; in a conversation, only the answer.

    is_chat: the prompt is a user's message
    longest: tokens that the model takes at most; None: any number

    UserError: the prompt alone has that many tokens.
    """
    ids = _prompt_ids(tokenizer, prompt, is_chat=is_chat)
    if longest is not None and len(ids) >= longest:
        raise UserError(
            f"the prompt has {len(ids)} tokens; the model takes {longest}",
            "a shorter --prompt",
            "--prompt",
        )
    if longest is not None:
        tokens = min(tokens, longest - len(ids))
    continued = _generate(
        model, ids, tokens, _Drawn(tokenizer.size, temperature, seed), tokenizer.eos
    )
    answer = tokenizer.decode(continued, special=False)
    return answer if is_chat else prompt + answer


def _prompt_ids(tokenizer: TextTokenizer, prompt: str, *, is_chat: bool) -> list[int]:
    """The ids of a prompt, at least one: an empty prompt becomes a line break."""
    if is_chat:
        text = tokenizer.template.prompt(prompt)
        return [int(i) for i in tokenizer.encode([text])[0]]
    ids = [*tokenizer.prefix, *tokenizer.encode([prompt])[0]]
    return [int(i) for i in ids or tokenizer.encode(["\n"])[0]]


@torch.no_grad()
def _generate(
    model: Any, ids: list[int], tokens: int, drawn: "_Drawn", end: int | None
) -> list[int]:
    device = model.get_input_embeddings().weight.device
    prompt = torch.tensor([ids], dtype=torch.int64, device=device)
    continued = model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=False,
        use_cache=True,
        logits_processor=[drawn],
        eos_token_id=end,
        pad_token_id=0 if end is None else end,
    )
    return [int(i) for i in continued[0, len(ids) :]]


class _Drawn:
    """A logits processor that leaves the drawn token as the only possible one."""

    def __init__(self, size: int, temperature: float, seed: int) -> None:
        self._size, self._temperature = size, temperature
        self._random = np.random.default_rng(seed)

    def __call__(self, _ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        logits = scores[0, : self._size].double().cpu().numpy()
        token = draw_token(logits, self._temperature, self._random)
        chosen = torch.full_like(scores, -torch.inf)
        chosen[0, token] = 0
        return chosen
