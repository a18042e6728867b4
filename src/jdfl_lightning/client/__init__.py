"""One client: the LightningModule, its training by Lightning's Trainer, Phase 1's probe, evaluation.

Nothing here knows of other clients or of a server.
"""
