"""A variational autoencoder: its noise follows the sample, its KL term is phased in by the step."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Squares:
    """Pictures of 12 x 12 with one filled square each."""

    def __init__(self, first, count):
        self.first, self.count = first, count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):
        pictures = np.zeros((len(ids), 144), np.float32)
        for picture, i in zip(pictures.reshape(-1, 12, 12), ids, strict=True):
            y, x, size = np.random.default_rng(self.first + i).integers(0, (7, 7, 3))
            picture[y : y + size + 3, x : x + size + 3] = 1
        return {"picture": pictures}


class VAE(nn.Module):
    def __init__(self, width, latent):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(144, width), nn.GELU(), nn.Linear(width, 2 * latent))
        self.decoder = nn.Sequential(nn.Linear(latent, width), nn.GELU(), nn.Linear(width, 144))

    def forward(self, picture):
        mean, log_var = self.encoder(picture).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (log_var / 2).exp()
        return self.decoder(z), mean, log_var


class Autoencoder:
    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self):
        return VAE(**self.fields)

    def loss(self, model, batch, step):
        picture = batch["picture"]
        logits, mean, log_var = model(picture)
        error = F.binary_cross_entropy_with_logits(logits, picture, reduction="sum")
        kl = 0.5 * (mean.square() + log_var.exp() - log_var - 1).sum()
        total, count = error + min(1.0, step / 100) * kl, len(picture)
        return {"loss": Mean(total, count), "error": Mean(error, count), "kl": Mean(kl, count)}

    def train_data(self):
        return Squares(0, self.data["samples"])
