"""A GAN: two phases in each step, each with its loss, its gradients and its own parameters."""

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from samecurve import Mean


class Ring:  # points around eight places on a circle
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):
        noise = np.stack([np.random.default_rng(i).normal(0, 0.05, 2) for i in ids])
        angle = np.asarray(ids) % 8 * np.pi / 4
        return {"x": (np.stack([np.cos(angle), np.sin(angle)], 1) + noise).astype(np.float32)}


def mlp(inside, width, outside):
    first, second = nn.Linear(inside, width), nn.Linear(width, width)
    return nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Linear(width, outside))


class Game:
    phases = {"discriminator": "critic.*", "generator": "generator.*"}

    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self):
        width, latent = self.fields["width"], self.fields["latent"]
        return nn.ModuleDict({"generator": mlp(latent, width, 2), "critic": mlp(2, width, 1)})

    def loss(self, model, batch, phase):
        critic, generator = model["critic"], model["generator"]
        real = batch["x"]
        latent, like = self.fields["latent"], {"dtype": real.dtype, "device": real.device}
        fake = generator(torch.randn(len(real), latent, **like))
        if phase == "generator":
            return Mean(F.softplus(-critic(fake)).sum(), len(real))
        loss = F.softplus(-critic(real)) + F.softplus(critic(fake.detach()))
        return Mean(loss.sum(), len(real))

    def sample(self, model, seed):  # 500 points, as a picture
        source = torch.Generator().manual_seed(seed)
        noise = torch.randn(500, self.fields["latent"], generator=source)
        x = model["generator"](noise.to(next(model.parameters()))).cpu().numpy()
        picture = np.full((64, 64), 255, np.uint8)
        picture[tuple((x * 20 + 32).clip(0, 63).astype(int).T)] = 0
        return [picture]

    def train_data(self):
        return Ring(self.data["samples"])
