"""Runs where the SuperLink does."""

from pathlib import Path

from jdfl_lightning.federation.flower import make_server_app

app = make_server_app(Path(__file__).with_name("federation.yaml"))
