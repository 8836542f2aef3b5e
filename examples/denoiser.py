"""A denoiser (diffusion by flow matching): for each sample a time and a noise of its own."""

import numpy as np
import torch
from torch import nn

from samecurve import Mean


class Circle:
    """Points of a circle."""

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, ids):
        angle = np.stack([np.random.default_rng(i).uniform(0, 2 * np.pi) for i in ids])
        return {"x": 1.4 * np.float32([np.sin(angle), np.cos(angle)]).T}


class Denoiser(nn.Module):  # points [n, 2], times [n, 1] -> the way from noise to data
    def __init__(self, width):
        super().__init__()
        first, second = nn.Linear(10, width), nn.Linear(width, width)
        self.net = nn.Sequential(first, nn.GELU(), second, nn.GELU(), nn.Linear(width, 2))

    def forward(self, x, time):
        waves = [(k * x).sin() for k in (1, 2, 4)]
        return self.net(torch.cat([x, time, time.square(), *waves], 1))


class Flow:
    def __init__(self, model, data):
        self.fields, self.data = model, data

    def model(self):
        return Denoiser(**self.fields)

    def loss(self, model, batch):
        x = batch["x"]
        time, noise = torch.rand_like(x[:, :1]), torch.randn_like(x)
        way = model(time * x + (1 - time) * noise, time)
        return Mean((way - (x - noise)).square().sum(), len(x))

    def sample(self, model, seed):  # 500 points, as a picture
        x = torch.randn(500, 2, generator=torch.Generator().manual_seed(seed))
        x = x.to(next(model.parameters()))
        for step in range(20):
            x = x + model(x, torch.full_like(x[:, :1], step / 20)) / 20
        picture = np.full((64, 64), 255, np.uint8)
        picture[tuple((x.cpu().numpy() * 16 + 32).clip(0, 63).astype(int).T)] = 0
        return [picture]

    def train_data(self):
        return Circle(self.data["samples"])
