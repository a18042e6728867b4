"""Runs at every site, where its SuperNode does."""

from pathlib import Path

from jdfl_lightning.federation.flower import make_client_app

app = make_client_app(Path(__file__).with_name("federation.yaml"))
