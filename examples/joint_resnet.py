"""A joint head on torchvision's ResNet-18, trained by Lightning with no federation: four visual domains of digits."""

import lightning.pytorch as pl
import torch
from torchvision.models import resnet18

from jdfl_lightning import DigitsDomains, DomainAccuracy, RandomTargets, SoftTargetKLLoss, replace_head


class Classifier(pl.LightningModule):
    """Trains on random joint targets; is judged by the class, for each domain."""

    def __init__(self, num_classes, domains):
        super().__init__()
        self.net = replace_head(resnet18(), num_classes, num_domains=len(domains))
        self.targets, self.loss = RandomTargets(len(domains)), SoftTargetKLLoss()
        self.accuracy = DomainAccuracy(num_classes, domains)

    def training_step(self, batch, batch_idx):  # noqa: D102
        return self.loss(self.net(batch[0]), self.targets(batch[2]), batch[1])

    def test_step(self, batch, batch_idx):  # noqa: D102
        self.log_dict(self.accuracy(self.net(batch[0]), batch[1], batch[2]))

    def configure_optimizers(self):  # noqa: D102
        return torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)


data = DigitsDomains(size=32)
module, trainer = Classifier(10, data.domain_names), pl.Trainer(max_epochs=2, logger=False, enable_checkpointing=False)
trainer.fit(module, data)
trainer.test(module, data)
