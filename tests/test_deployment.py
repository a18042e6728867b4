"""Flower as it is deployed: processes, TLS, node authentication, `flwr run`, and a SuperNode that is killed."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if sys.version_info < (3, 11):
    pytest.skip("flwr needs Python 3.11", allow_module_level=True)

import yaml
from PIL import Image

from deployment import Deployment, kill, make_certificates, make_node_key
from helpers import contents, environment, until
from jdfl_lightning import DigitsDomains, fit
from jdfl_lightning.config import parse_experiment

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1500),
    pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="finds processes in /proc"),
]
EXAMPLE = Path(__file__).parents[1] / "examples/flower_app"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of two sites: digits in ink at one, before photographs at the other; 3 classes, 12 images each."""
    data = DigitsDomains(size=16)
    images, labels, domains = data.load()
    roots = []
    for site, domain in enumerate(("ink", "photo")):
        roots.append(tmp_path_factory.mktemp(f"the images of site {site}"))
        for label in range(3):
            folder = roots[-1] / f"digit{label}"
            folder.mkdir()
            chosen = (labels == label) & (domains == data.domain_names.index(domain))
            for number, pixels in enumerate(images[chosen][:12].numpy()):
                Image.fromarray(pixels).save(folder / f"{number}.png")
    return roots


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A SuperLink on loopback; processes find the helpers of the tests."""
    folder = tmp_path_factory.mktemp("deployment") / "all of it"
    found = Deployment(folder, {"OMP_NUM_THREADS": "1", "PYTHONPATH": environment()["PYTHONPATH"]})
    try:
        found.start_link()
        yield found
    finally:
        found.close()


class Sites:
    """Two sites at their SuperNodes."""

    def __init__(self, deployment: Deployment, folders: list[Path]) -> None:
        self.deployment, self.folders = deployment, folders
        self.keys = [make_node_key(deployment.folder / f"site{site}.key") for site in range(2)]
        for key in self.keys:
            deployment.flwr("supernode", "register", str(key.with_suffix(".pub")), "loopback")
        self.processes = [self.start(site) for site in range(2)]

    def start(self, site: int) -> subprocess.Popen[bytes]:
        states = self.deployment.folder / f"states of {site}"
        return self.deployment.start_node(
            f"site{site}", self.keys[site], partition_id=site, data_root=str(self.folders[site]), state_dir=str(states)
        )


@pytest.fixture(scope="module")
def sites(deployment: Deployment, folders: list[Path]) -> Sites:
    return Sites(deployment, folders)


def make_app(folder: Path, **settings: object) -> Path:
    """The example's app with other settings."""
    shutil.copytree(EXAMPLE, folder)
    file = folder / "sites/federation.yaml"
    config = yaml.safe_load(file.read_text())
    config["data"]["init_args"]["size"] = 16
    file.write_text(yaml.safe_dump(config | {"backbone": "helpers.tiny_net", "epochs": 1} | settings))
    return folder


def listed(roster: Path) -> dict[str, object]:
    """The backend of a server that knows its sites beforehand."""
    where = "jdfl_lightning.federation.server.SitesBackend"
    return {"class_path": where, "init_args": {"roster": str(roster)}}


def fit_here(app: Path, folders: list[Path], *arguments: str) -> None:
    """Run the app's settings on this machine, with the folders of all sites."""
    config = yaml.safe_load((app / "sites/federation.yaml").read_text())
    config["data"]["init_args"]["roots"] = [str(folder) for folder in folders]
    config["backend"] = "LocalBackend"
    Path("here.yaml").write_text(yaml.safe_dump(config))
    fit(parse_experiment("test", ["--config=here.yaml", *arguments]))


def assert_same_run(ours: str, theirs: str) -> None:
    here, there = contents(ours), contents(theirs)
    assert here["rows"] == there["rows"]
    for name in ("last.safetensors", "best.safetensors", "discovery.safetensors"):
        assert here[name] == there[name]


def test_a_federation_is_its_local_rehearsal(
    deployment: Deployment, sites: Sites, folders: list[Path], tmp_path: Path
) -> None:
    """Discovery and two rounds, then a third one by a second `flwr run` that goes on; sites are known by their keys."""
    roster = {
        site: {"key": key.with_suffix(".pub").read_text(), "clients": 1, "images": 36}
        for site, key in enumerate(sites.keys)
    }
    (tmp_path / "roster.yaml").write_text(yaml.safe_dump(roster))
    app, run_dir = make_app(tmp_path / "app", backend=listed(tmp_path / "roster.yaml")), tmp_path / "federation"
    fit_here(app, folders, "--rounds=2", "--run_dir=two")
    fit_here(app, folders, "--rounds=3", "--run_dir=three")
    deployment.wait(deployment.run(app, rounds=2, run_dir=str(run_dir)), seconds=400)
    assert_same_run("two", str(run_dir))
    assert not list(run_dir.glob("clients/*"))
    assert len(list(deployment.folder.glob("states of 0/*/site0/0-*.safetensors"))) == 2
    assert not any("ink" in line or "photo" in line for line in map(str, contents(str(run_dir)).items()))
    deployment.wait(deployment.run(app, rounds=3, resume=str(run_dir)), seconds=400)
    assert_same_run("three", str(run_dir))


def test_a_site_with_another_key_is_refused(deployment: Deployment, sites: Sites, tmp_path: Path) -> None:
    """The roster has the keys of the two sites the wrong way round: neither may take the other's number."""
    roster = {site: {"key": sites.keys[1 - site].with_suffix(".pub").read_text()} for site in range(2)}
    (tmp_path / "roster.yaml").write_text(yaml.safe_dump(roster))
    run = deployment.run(make_app(tmp_path / "app", backend=listed(tmp_path / "roster.yaml")), rounds=1)
    try:
        refused = ("site 0 has another key in the roster", "site 1 has another key in the roster")
        until(lambda: all(line in deployment.said(run) for line in refused), 400, "both refusals")
    finally:
        deployment.flwr("stop", run, "loopback")


def test_a_node_that_is_killed_and_comes_back(
    deployment: Deployment, sites: Sites, folders: list[Path], tmp_path: Path
) -> None:
    """Its client is absent from the rounds that it misses, and goes on from the state that it had."""

    def rule(**options: object) -> dict[str, object]:
        return {"class_path": "helpers.Patient", "init_args": {"folder": str(tmp_path), **options}}

    app, run_dir = make_app(tmp_path / "app", algorithm=rule()), tmp_path / "federation"
    away = make_app(tmp_path / "away", algorithm=rule(absent=True))
    fit_here(away, folders, "--rounds=4", "--run_dir=here")
    run = deployment.run(app, rounds=4, run_dir=str(run_dir))
    until((tmp_path / "client1-begun").exists, 400, "round 2")
    kill(sites.processes[1])
    (tmp_path / "go").touch()
    until((tmp_path / "client0-begun").exists, 400, "round 3")  # the SuperLink has noticed
    sites.processes[1] = sites.start(1)
    log = deployment.log("site1")
    said = len(log.read_bytes())
    until(lambda: "SuperNode ID" in log.read_bytes()[said:].decode(), 300, log.read_text())
    (tmp_path / "back").touch()
    deployment.wait(run, seconds=400)
    here, there = contents("here"), contents(str(run_dir))
    assert here["last.safetensors"] == there["last.safetensors"]
    rows = there["rows"]
    for ours, theirs in zip(here["rows"], rows, strict=True):  # but for what the site was not there to evaluate
        assert {n: v for n, v in ours.items() if "test" not in n} == {
            n: v for n, v in theirs.items() if "test" not in n
        }
    assert [row["test/acc/site1"] == "nan" for row in rows] == [True, True, False, False]
    assert [(row["clients"], row["refused"]) for row in rows] == [
        ("2.0", "0.0"),
        ("1.0", "1.0"),
        ("1.0", "1.0"),
        ("2.0", "0.0"),
    ]
    assert "client 1 does not count" in deployment.said(run)


def test_an_unknown_node_is_refused(deployment: Deployment, folders: list[Path]) -> None:
    key = make_node_key(deployment.folder / "stranger.key")
    stranger = deployment.start_node("stranger", key, partition_id=1, data_root=str(folders[1]))
    assert stranger.wait(timeout=300) != 0
    assert "Failed to activate SuperNode" in deployment.log("stranger").read_text()


def test_nothing_travels_in_the_clear(deployment: Deployment, folders: list[Path]) -> None:
    """The SuperLink has no answer without TLS, and a SuperNode does not talk to one that its CA has not signed for."""
    with socket.create_connection(("127.0.0.1", deployment.port), 5) as plain:
        plain.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert plain.recv(100) == b""
    other = deployment.folder / "another authority"
    other.mkdir()
    make_certificates(other)
    key = make_node_key(deployment.folder / "careful.key")
    deployment.flwr("supernode", "register", str(key.with_suffix(".pub")), "loopback")
    careful = deployment.start_node("careful", key, authority=other / "ca.crt", partition_id=1)
    assert careful.wait(timeout=300) != 0
    assert "CERTIFICATE_VERIFY_FAILED" in deployment.log("careful").read_text()
