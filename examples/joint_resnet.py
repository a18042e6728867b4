"""A joint head on torchvision's ResNet-18, trained by Lightning with no federation: four visual domains of digits."""

import lightning.pytorch as pl
import torch
from torchvision.models import resnet18

from jdfl_lightning import DigitsDomains, DomainAccuracy, RandomTargets, SoftTargetKLLoss, replace_head


class Classifier(pl.LightningModule):
    def __init__(self, num_classes, domains):
        super().__init__()
        self.net = replace_head(resnet18(), num_classes, num_domains=len(domains))
        self.targets, self.loss = RandomTargets(len(domains)), SoftTargetKLLoss()
        self.accuracy = DomainAccuracy(num_classes, domains)  # counts the class alone

    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), self.targets(batch[2]), batch[1])

    def test_step(self, batch, batch_idx):
        self.accuracy.update(self.net(batch[0]), batch[1], batch[2])

    def on_test_epoch_end(self):
        self.log_dict(self.accuracy.compute())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


data, trainer = DigitsDomains(size=32), pl.Trainer(max_epochs=3, logger=False, enable_checkpointing=False)
trainer.fit(module := Classifier(10, data.domain_names), data)
trainer.test(module, data)
