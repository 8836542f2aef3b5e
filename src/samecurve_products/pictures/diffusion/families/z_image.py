"""Z-Image: one transformer over the tokens of a picture and of its caption."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from samecurve_products.pictures.diffusion.families.base import Conditions, Family
from samecurve_products.pictures.diffusion.families.schedule import dynamic_shift
from samecurve_products.pictures.diffusion.families.text_side import device_of, templated, text_side


class ZImage(Family):
    """Z-Image. Guidance is what is added to 1: 0 is none.

    Its denoiser counts time from noise (0) to a picture (1), and answers picture - noise.
    """

    guidance: ClassVar[float] = 5.0
    longest_caption: ClassVar[int | None] = 512  # as the library's pipeline has it

    def encode_captions(self, parts: Mapping[str, Any], captions: Sequence[str]) -> Conditions:
        """Embeddings, as many tokens as a caption has, then zeros; and that number of tokens."""
        pipeline = text_side(self.opened, parts)
        with torch.no_grad():
            embeddings, _ = pipeline.encode_prompt(
                list(captions),
                device=device_of(self.opened, parts),
                do_classifier_free_guidance=False,
                max_sequence_length=self.longest_caption,
            )
        assert self.longest_caption is not None
        whole = embeddings[0].new_zeros(self.longest_caption, embeddings[0].shape[-1])
        padded = pad_sequence([whole, *embeddings], batch_first=True)[1:]
        lengths = torch.tensor([len(rows) for rows in embeddings], device=padded.device)
        return {"embeddings": padded, "lengths": lengths}

    def chat(self, tokenizer: Any, caption: str) -> str:
        return templated(tokenizer, caption, enable_thinking=True)

    def caption_outline(self) -> Mapping[str, Any]:
        """The longest caption: the denoiser's work grows with its tokens."""
        width = self.opened.denoiser.config["cap_feat_dim"]
        return {"embeddings": (1, self.longest_caption, width), "lengths": [self.longest_caption]}

    def predict(
        self, model: nn.Module, noisy: Tensor, time: Tensor, conditions: Mapping[str, Tensor]
    ) -> Tensor:
        lengths: Any = conditions["lengths"]
        if isinstance(lengths, Tensor):
            lengths = lengths.long().tolist()
        captions = conditions["embeddings"].to(noisy.dtype)
        steps = (time.double() * self.schedule.steps).float()
        answers = model(
            list(noisy.unsqueeze(2).unbind()),
            (self.schedule.steps - steps) / self.schedule.steps,
            [rows[:length] for rows, length in zip(captions, lengths, strict=True)],
            return_dict=False,
        )[0]
        return -torch.stack(answers).squeeze(2)

    def is_guided(self, guidance: float) -> bool:
        return guidance > 0

    def guided(self, answer: Tensor, negative: Tensor, guidance: float) -> Tensor:
        return answer + guidance * (answer - negative)

    def set_times(self, scheduler: Any, steps: int, tokens: int) -> None:
        times = torch.linspace(1.0, 1 / steps, steps).tolist()
        scheduler.set_timesteps(sigmas=times, mu=dynamic_shift(scheduler).line(tokens))
