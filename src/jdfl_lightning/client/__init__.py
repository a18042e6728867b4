"""One client: the LightningModule, its training by Lightning's Trainer, Phase 1's probe, evaluation.

Nothing here depends on other clients or on a server.
"""
