import torch.nn.functional as F
from parts import Net, Points

import samecurve
from samecurve import Mean


class Ring:
    def model(self):
        return Net()

    def loss(self, model, batch):
        logits = model(batch["x"])
        return Mean(F.cross_entropy(logits, batch["inside"], reduction="sum"), len(logits))

    def metrics(self, model, batch):
        right = model(batch["x"]).argmax(-1) == batch["inside"]
        return {"accuracy": Mean(right.sum(), len(right))}

    def train_data(self):
        return Points(0, 1000)

    def eval_data(self):
        return Points(1000, 200)


often = {"train.eval_every": "1ep", "train.save_every": "1ep"}
samecurve.train(Ring, save_dir="saved", global_batch=50, lr=1e-2, epochs=5, set=often)
