import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from parts import Net, Points
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DataLoader


class Ring(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, _index):
        loss = F.cross_entropy(self.net(batch["x"]), batch["inside"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, _index):
        right = (self.net(batch["x"]).argmax(-1) == batch["inside"]).float()
        self.log("accuracy", right.mean(), prog_bar=True, batch_size=len(right), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        schedule = CosineAnnealingLR(optimizer, T_max=100)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self):
        size = 50 // self.trainer.world_size
        return DataLoader(Points(0, 1000), batch_size=size, shuffle=True)

    def val_dataloader(self):
        return DataLoader(Points(1000, 200), batch_size=50)


pl.seed_everything(0)
trainer = pl.Trainer(
    max_epochs=5, gradient_clip_val=1.0, callbacks=[ModelCheckpoint("saved", save_last=True)]
)
trainer.fit(Ring(), ckpt_path="last")
