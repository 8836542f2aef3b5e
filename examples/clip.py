"""CLIP: each picture is compared with every caption of the whole batch, on any devices."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Spots:
    """Noisy pictures of 12 x 12 with a bright spot; the caption says its row and its column."""

    def __len__(self):
        return 2000

    def __getitem__(self, ids):
        pictures = np.stack([np.random.default_rng(i).normal(0, 0.5, (12, 12)) for i in ids])
        place = np.asarray(ids) * 7919 % 100
        captions = np.stack([place // 10, 10 + place % 10], 1)
        for picture, (y, x) in zip(pictures, captions, strict=True):
            picture[y : y + 3, x - 10 : x - 7] += 2
        return {"picture": pictures.astype(np.float32), "caption": captions}


class Towers(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.picture = nn.Sequential(nn.Linear(144, width), nn.GELU(), nn.Linear(width, 32))
        self.words = nn.EmbeddingBag(20, width, mode="sum")
        self.caption = nn.Sequential(nn.GELU(), nn.Linear(width, 32))
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, picture, caption):
        pictures = self.picture(picture.flatten(1))
        return F.normalize(pictures), F.normalize(self.caption(self.words(caption)))


class Clip:
    def __init__(self, model):
        self.fields = model

    def model(self):
        return Towers(**self.fields)

    def features(self, model, batch):  # a row for each sample
        picture, caption = model(batch["picture"], batch["caption"])
        return {"picture": picture, "caption": caption, "scale": model.scale.expand(len(picture))}

    def batch_loss(self, features):  # over all samples of the step
        scores = features["scale"][0].exp() * features["picture"] @ features["caption"].T
        own = torch.arange(len(scores), device=scores.device)
        both = (F.cross_entropy(s, own, reduction="sum") for s in (scores, scores.T))
        return Mean(sum(both) / 2, len(scores))

    def train_data(self):
        return Spots()
