"""Two tasks as users write them, whose losses have CUDA kernels of their own: labels of pixels, and
CTC over sounds of unequal length.
"""

from typing import Any

import numpy as np
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Pictures:
    """Discs on noise; the label of a pixel says whether the disc covers it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        y, x = np.mgrid[:12, :12]
        pictures, labels = [], []
        for number in ids:
            random = np.random.default_rng(int(number))
            centre_y, centre_x = random.uniform(3, 9, 2)
            label = np.hypot(y - centre_y, x - centre_x) < 3
            pictures.append(label + random.standard_normal((12, 12)))
            labels.append(label)
        return {
            "picture": np.array(pictures, np.float32)[:, None],
            "label": np.array(labels, np.int64),
        }


class Segmentation:
    """Pixels of a disc: a picture is made smaller and larger again."""

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1, padding_mode="reflect"),
            nn.GroupNorm(2, 8),
            nn.GELU(),
            nn.AdaptiveAvgPool2d(6),
            nn.Dropout2d(0.1),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.Upsample(scale_factor=2, mode="bilinear"),
            nn.Conv2d(8, 2, 1),
        )

    def loss(self, model: nn.Module, batch: Any) -> Mean:
        error = F.cross_entropy(model(batch["picture"]), batch["label"], reduction="sum")
        return Mean(error, batch["label"].numel())

    def metrics(self, model: nn.Module, batch: Any) -> dict[str, Mean]:
        right = model(batch["picture"]).argmax(1) == batch["label"]
        return {"accuracy": Mean(right.sum(), right.numel())}

    def train_data(self) -> Pictures:
        return Pictures()

    def eval_data(self) -> Pictures:
        return Pictures()


class Sounds:
    """Frames of three numbers, of which each letter has some; lengths differ."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, ids: Any) -> dict[str, Any]:
        frames = np.zeros((len(ids), 20, 3), np.float32)
        letters, lengths = np.zeros((len(ids), 4), np.int64), np.zeros((len(ids), 2), np.int64)
        for row, number in enumerate(ids):
            random = np.random.default_rng(int(number))
            spoken, length = random.integers(1, 4, 2 + number % 3), 14 + number % 7
            sounds = np.repeat(np.eye(3)[spoken - 1], 4, axis=0)
            frames[row, : len(sounds)] = sounds
            frames[row, :length] += 0.1 * random.standard_normal((length, 3))
            letters[row, : len(spoken)], lengths[row] = spoken, (length, len(spoken))
        return {"frames": frames, "letters": letters, "lengths": lengths}


class Recogniser(nn.Module):
    """A GRU in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 8, batch_first=True, bidirectional=True)
        self.head = nn.Linear(16, 4)

    def forward(self, frames: Any) -> Any:
        hidden, _ = self.gru(frames)
        return self.head(hidden).log_softmax(-1).transpose(0, 1)


class Speech:
    """Letters of a sound, by CTC."""

    def model(self) -> nn.Module:
        return Recogniser()

    def loss(self, model: nn.Module, batch: Any) -> Mean:
        frames, letters = batch["lengths"].unbind(1)
        error = F.ctc_loss(
            model(batch["frames"]), batch["letters"], frames, letters, reduction="sum"
        )
        return Mean(error, letters.sum())

    def train_data(self) -> Sounds:
        return Sounds()
