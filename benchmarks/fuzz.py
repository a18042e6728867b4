"""Give the command line things that nobody foresaw: strange arguments, and damaged or forged files.

    python benchmarks/fuzz.py                      # 2,000 cases
    python benchmarks/fuzz.py --seed 0 --only 1234 # one of them again, with what it printed

A case is a command in a process of its own; which one is a function of seed and number. In the even cases a command
with sound and cheap arguments gets some that are strange; in the odd ones a file that the command reads is damaged
(bits, ends, insertions), exchanged, or forged: well-formed, its checksum right, its values of other types and sizes.

A case passes if the command ends within a minute with exit code 0, or with 2 and one line that begins with
``jdfl-lightning:`` (notes may come before it), or with 1 where that is documented: `test` whose numbers differ, and a
suite with runs that failed. No trace, no signal, no more than 1 GiB of memory beside that of the imported packages, and
nothing written outside its folder; other programs and connections are refused, and count as a failure. Commands that
only look leave every file as it was, and so does `runs rm`, but for the folders that it was given, if it ends with 0.
(Two things are by design: what an algorithm raises is shown with its trace on standard output, as it may be the user's;
and a named pipe that an argument names is waited for, so that none is given to options that read or write one.) `watch`
is asked for its numbers once, without a browser, and `download` finds nobody who answers.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import shutil
import tempfile
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", WANDB_MODE="disabled")
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX2")  # a virtual machine may announce instructions that it refuses

import numpy as np
import torch
import yaml
from forked import Ended, run_forked
from PIL import Image
from timing import write_section

from jdfl_lightning.cli import main as command
from jdfl_lightning.core.files import as_json
from jdfl_lightning.storage import trust
from jdfl_lightning.storage.records import load_record, save_record
from jdfl_lightning.studies.watch import WatchServer, live_state

Args = list[str]
_MEMORY = 1024
"""MiB that a case may take beside what is there before it begins."""
TINY = {
    "--data.size": "8",
    "--data.num_clients": "4",
    "--data.test_fraction": "0.5",
    "--rounds": "1",
    "--epochs": "1",
    "--batch_size": "128",
    "--clustering.epochs": "1",
    "--backend": "LocalBackend",
}
IMAGES = {"--data": "ImageFolderDomains", "--data.root": "tree", "--data.size": "8", "--data.num_clients": "2"}
COSTLY = ("rounds", "epochs", "size", "num_clients", "max_epochs", "seeds", "batch_sizes", "workers", "max_domains")
"""Settings of which a large value only means a long time."""
# fmt: off
SMALL = [
    "", " ", "0", "-1", "1", "2", "nan", "inf", "-inf", "null", "true", "1.5", "1e-400", "0x1", "0b1", "one", "[]",
    "{}", "[1]", "é", "\u202e", "\x00", "\n", "\t1", "a\nb: c", "'", '"', "*", "&a", "!!python/object:os.system x",
    "--", "-", "--rounds", "=", "==", "%s", "~", "../..", "\u0661", "½", "-0", "+1", "1_0", "yes", "\ud800",
]
LARGE = ["99999999999", "1e308", "1" + "0" * 30, "9" * 5000, "-" + "9" * 400, "x" * 100_000, "1e400", "4294967296"]
PATHS = [
    ".", "/", "nowhere", "nowhere/at/all", "tree", "pipe", "run", "base", "disc", "diag", "run/config.yaml", "empty",
    "run/metrics.csv", "run/best.safetensors", "run/checkpoints/2.safetensors", "run/checkpoints", "/dev/null",
    "/dev/null/x", "/proc/self/nowhere", "x" * 300, "loop", "gone", "tree/ink/0/0.png", "é/\n", "auto", "letters.yaml",
]
CLASSES = [
    "os.system", "subprocess.Popen", "builtins.eval", "shutil.rmtree", "jdfl_lightning", "jdfl_lightning.FedAvg",
    "FedAvg", "SCAFFOLD", "FedDyn", "FedDC", "FedProc", "MOON", "FedProx", "RobustFedAvg", "PrivateFedAvg", "Algorithm",
    "PaperCNN", "DigitsDomains", "PACS", "OfficeCaltech", "ImageFolderDomains", "SiteFolders", "DomainDataModule",
    "LocalBackend", "PoolBackend", "WandbRounds", "lightning.pytorch.loggers.CSVLogger", "torch.nn.Linear", "resnet18",
    "resnet999", "torchvision.models.resnet18", "torchvision.models.vgg11_bn", "nowhere.Nothing", "os.", ".os", "..",
    "collections",
]
# fmt: on
OPTIONS: dict[str, list[str]] = {
    "--seed_everything": ["0", "4294967295", "4294967296", "18446744073709551616"],
    "--data": CLASSES,
    "--data.size": ["7", "9", "16", "257", "1000000000"],
    "--data.num_clients": ["1", "3", "5", "1798", "1000000000"],
    "--data.test_fraction": ["0", "1", "0.999", "0.0001"],
    "--data.root": PATHS,
    "--data.roots": ["[tree]", "[tree, tree]", "tree"],
    "--data.download": ["false", "maybe"],
    "--backbone": CLASSES,
    "--algorithm": CLASSES,
    "--algorithm.class_path": CLASSES,
    "--algorithm.weighting": ["uniform", "samples"],
    "--algorithm.alpha": ["0", "1e-30", "1e30"],
    "--algorithm.init_args": ["{alpha: 1}", "{}", "[1]"],
    "--algorithm.init_args.mu": ["1"],
    "--supervision": ["base", "hard", "graded", "random", "BASE"],
    "--num_domains": ["1", "4", "5"],
    "--supervision.alpha": ["0.5", "1", "1e-30"],
    "--supervision.tau": ["1e-30", "1e30", "0.1"],
    "--supervision.phi": ["0", "1", "0.5"],
    "--score": ["max", "sum", "mean"],
    "--rounds": ["1", "2"],
    "--client_fraction": ["1e-9", "1", "0.5"],
    "--epochs": ["1", "2"],
    "--batch_size": ["1000", "2147483648", "9223372036854775808"],
    "--lr": ["1e-30", "1e30", "1e308", "0.1"],
    "--momentum": ["0.9", "1", "0.999999999"],
    "--weight_decay": ["1e30", "0.1"],
    "--evaluate_every": ["2", "9223372036854775808"],
    "--max_update_norm": ["1", "1e308"],
    "--min_clients": ["1", "2", "4"],
    "--discovery": PATHS,
    "--backend": [*CLASSES, "RayBackend0"],
    "--backend.workers": ["0", "-1", "auto"],
    "--backend.threads": ["1", "0"],
    "--logger": ["false", "lightning.pytorch.loggers.CSVLogger", "os.system"],
    "--run_dir": PATHS,
    "--resume": PATHS,
    "--config": PATHS,
    "--trust": ["true", "false", "TRUE"],
    "--print_config": ["", "skip_null", "comments"],
    "--help": [""],
    "--algorithm.clip_norm": ["1", "1e-30", "1e308"],
    "--algorithm.noise_multiplier": ["1", "1e-30"],
    "--algorithm.delta": ["1e-5", "1", "1e-300"],
    "--checkpoint": ["run/config.yaml", "letters.yaml", "tree", "/dev/zero", "gone"],
    "--checkpoint.every": ["1", "2", "9223372036854775808"],
    "--checkpoint.keep": ["1", "9223372036854775808"],
    "--checkpoint.reset_damaged_clients": ["true"],
    "--clustering": ["run/config.yaml", "letters.yaml", "tree", "/dev/zero", "gone"],
    "--clustering.epochs": ["1", "2"],
    "--clustering.batch_size": ["1000", "9223372036854775808"],
    "--clustering.layers": ["A", "B", "C", "[]", "['*']", "['[']", "[1]", "[head]"],
    "--clustering.labels": ["classes", "rotations"],
    "--clustering.criterion": ["elbow", "silhouette"],
    "--clustering.max_domains": ["1", "2", "100"],
    "--clustering.fraction": ["1e-9", "0.5", "1"],
    "--clustering.sketch_dim": ["8", "1024", "1000000000000"],
    "--clustering.newcomers": ["nearest", "update"],
    "--trainer.accelerator": ["cpu", "auto", "gpu", "tpu", "mps", "abacus"],
    "--trainer.devices": ["1", "auto", "7", "-1"],
    "--trainer.precision": ["32-true", "bf16-mixed", "64-true", "bf16-true", "16-true"],
    "--trainer.gradient_clip_val": ["1", "1e-30"],
    "--trainer.deterministic": ["true"],
    "--seeds": ["0", "1", "0,0", "3..1", "0..0", ",", "-1"],
    "--batch_sizes": ["64", "0", "64,64"],
    "--max_epochs": ["1", "0"],
    "--algorithms": ["FedAvg", "FedAvg,SCAFFOLD", "os.system", "FedAvg,jdfl_lightning.FedAvg", ","],
    "--supervisions": ["base", "base,random", "hard", "none"],
    "--run": PATHS,
    "--weights": ["best", "last", "worst"],
    "--output": ["out.csv", "report", "run", "/dev/full", "tree/ink/0/0.png", "tree", "/dev/null/x", "é/\n"],
    "--target": ["0.5", "0", "1", "2"],
    "--json": ["true", "false", "maybe"],
    "--yes": ["true", "false", "maybe"],
    "--port": ["0", "1", "65536", "-1", "80"],
    "--format": ["lightning", "hub", "torch", "pickle"],
    "--shell": ["bash", "zsh", "fish"],
    "--root": ["tree", "nowhere", "empty", "run", "/dev/null/x", "pipe", "gone", "loop", "tree/ink"],
    "--unknown": ["1"],
    "--data.unknown": ["1"],
    "--roun": ["1"],
    "-h": [""],
    "-x": [""],
}
"""What is tried with any command; most belong to some of them only."""
BASES: list[Args] = [
    ["fit", "--supervision", "base"],
    ["fit", "--supervision", "graded", "--num_domains", "2"],
    ["fit", "--resume", "run", "--rounds", "3"],
    ["fit", "--discovery", "disc", "--supervision", "hard"],
    ["discover"],
    ["diagnose", "--seeds", "0", "--batch_sizes", "128", "--max_epochs", "1"],
    ["suite", "--seeds", "0", "--supervisions", "base"],
    ["test", "--run", "run"],
    ["predict", "--run", "run", "tree/ink/0"],
    ["report", "run", "base"],
    ["validate", "--supervision", "base"],
    ["validate", "--supervision", "graded", "--num_domains", "2", "--json"],
    ["runs", "list", "run", "base", "disc"],
    ["runs", "list", "--json"],
    ["runs", "show", "run"],
    ["runs", "compare", "run", "base"],
    ["runs", "rm", "base", "disc", "--yes"],
    ["runs", "rm", "run"],
    ["watch", "run"],
    ["download", "--data", "PACS", "--root", "tree"],
    ["completion"],
    ["export", "--run", "run", "--format", "lightning"],
    ["export", "--run", "base", "--format", "hub"],
]
_TAKES_TINY = ("fit", "discover", "diagnose", "suite", "validate")
_PLACES = ("runs", "report", "watch", "predict")
"""Commands whose paths stand alone."""
_LOOKS = ("runs", "watch", "validate", "completion", "download")
"""Commands that change nothing, but for `runs rm`."""


_OWN: dict[str, list[str]] = {
    "diagnose": ["--seeds", "--batch_sizes", "--max_epochs"],
    "suite": ["--seeds", "--algorithms", "--supervisions", "--num_domains"],
    "test": ["--run", "--score", "--trust", "--data.root", "-h"],
    "predict": ["--run", "--score", "--trust", "--weights", "--output"],
    "report": ["--output", "--target"],
    "validate": ["--json"],
    "runs": ["--json", "--yes", "-h"],
    "watch": ["--port", "-h"],
    "download": ["--data", "--root", "-h"],
    "completion": ["--shell", "-h"],
    "export": ["--run", "--format", "--output", "--weights", "--trust", "-h"],
}
"""Options of a command beside those of fit; of `test` and so on, all."""


def pick_option(chance: random.Random, name: str) -> str:
    """Return an option, mostly one that a command has."""
    foreign = {own for options in _OWN.values() for own in options}
    foreign -= {"--num_domains", "--score", "--trust", "--data", "--data.root", "-h"}
    shared = [option for option in OPTIONS if option not in foreign] if name in _TAKES_TINY else []
    own = _OWN.get(name, [])
    if chance.random() < 0.07:
        return chance.choice(list(OPTIONS))
    return chance.choice(own if own and (not shared or chance.random() < 0.3) else shared or list(OPTIONS))


def pick_value(chance: random.Random, option: str) -> str:
    """Return a value for an option: one that it knows, or one that it should not."""
    costly = option.rpartition(".")[2].lstrip("-") in COSTLY
    paths = (
        [path for path in PATHS if path != "pipe"] if option in ("--output", "--clustering", "--checkpoint") else PATHS
    )
    sources = [OPTIONS.get(option, SMALL), SMALL] + ([] if costly else [LARGE, paths, CLASSES])
    return chance.choice(chance.choices(sources, [16, 4, 1, 1, 1][: len(sources)])[0])


def fuzz_arguments(chance: random.Random) -> Args:
    """Return a command with strange arguments."""
    if chance.random() < 0.03:
        word = chance.choice(["", "fitt", "FIT", "--version", "-h", "\x00", "fit\n", "é", "--", "-1", "tests"])
        return [word, *(chance.choice(SMALL) for _ in range(chance.randrange(3)))]
    base = chance.choice(BASES)
    pairs = [[word] for word in base]
    if base[0] in _TAKES_TINY:
        dropped = ("--data.size", "--data.num_clients", "--data.test_fraction") if "--resume" in base else ()
        pairs += [[name, value] for name, value in TINY.items() if name not in (*base, *dropped)]
    for _ in range(chance.choices([1, 2, 3], [5, 3, 1])[0]):
        if base[0] in _PLACES and chance.random() < 0.4:
            pairs.append([chance.choice([path for path in PATHS if path != "pipe"])])
            continue
        option = pick_option(chance, base[0])
        value = pick_value(chance, option)
        form = chance.choices(["pair", "joined", "alone", "bare", "twice", "end"], [16, 8, 1, 1, 1, 1])[0]
        word = {
            "pair": [option, value],
            "joined": [f"{option}={value}"],
            "alone": [option],
            "bare": [value],
            "twice": [option, value, option, pick_value(chance, option)],
            "end": ["--", option, value],
        }[form]
        pairs.insert(chance.randint(1, len(pairs)) if form == "bare" else len(pairs), word)
    if chance.random() < 0.04:
        del pairs[chance.randrange(len(pairs))]
    return [word for pair in pairs for word in pair]


# --- files


def fuzz_files(chance: random.Random, folder: Path) -> Args:
    """Damage or forge one file in a folder; return a command that reads it."""
    tiny = [word for pair in TINY.items() for word in pair]
    tree = [word for pair in (TINY | IMAGES).items() for word in pair]
    resume = ["fit", "--resume", "run", "--rounds", "3"]
    commands: dict[str, list[Args]] = {
        "run": [
            resume,
            resume,
            ["fit", "--resume", "run/checkpoints/1.safetensors", "--rounds", "3"],
            ["test", "--run", "run"],
            ["predict", "--run", "run", "tree/ink/0"],
            ["report", "run", "base"],
            ["fit", *tiny, "--discovery", "run", "--supervision", "graded"],
            ["fit", "--config", "run/config.yaml"],
            ["discover", "--config", "run/config.yaml"],
            ["fit", *tiny, "--supervision", "base", "--run_dir", "run", "--resume", "auto"],
            ["runs", "list", "."],
            ["runs", "show", "run"],
            ["runs", "compare", "run", "base"],
            ["runs", "rm", "run", "base", "--yes"],
            ["watch", "run"],
            ["validate", "--config", "run/config.yaml"],
            ["export", "--run", "run", "--format", chance.choice(["lightning", "hub"])],
        ],
        "base": [
            ["test", "--run", "base"],
            ["fit", "--resume", "base", "--rounds", "3"],
            ["report", "base"],
            ["runs", "show", "run", "base", "--json"],
            ["runs", "rm", "base", "run", "--yes"],
            ["watch", "base"],
        ],
        "disc": [
            ["fit", *tiny, "--discovery", "disc"],
            ["report", "run", "disc"],
            ["runs", "list", "disc", "--json"],
            ["runs", "rm", "disc", "--yes"],
            ["watch", "disc"],
        ],
        "diag": [["diagnose", "--resume", "diag", "--seeds", "0,1", "--batch_sizes", "128", "--max_epochs", "1"]],
        "tree": [
            ["predict", "--run", "run", "tree"],
            ["fit", *tree, "--supervision", "base"],
            ["validate", *tree, "--supervision", "base"],
        ],
    }
    place = chance.choices(list(commands), [6, 2, 2, 1, 1])[0]
    words = chance.choice(commands[place])
    files = sorted(path for path in (folder / place).rglob("*") if path.is_file() and not _is_picture(path, place))
    damage(chance, chance.choice(files), folder)
    trusted = words[0] in ("fit", "test", "predict") and chance.random() < 0.3
    return [*words, "--trust", "true"] if trusted else list(words)


def _is_picture(path: Path, place: str) -> bool:
    return path.suffix == ".png" and place != "tree"


def damage(chance: random.Random, file: Path, folder: Path) -> None:
    """Damage a file in one of many ways."""
    forge = {".yaml": _forge_yaml, ".json": _forge_json, ".csv": _forge_csv, ".safetensors": _forge_tensors}
    if file.suffix in forge and chance.random() < 0.6:
        forge[file.suffix](chance, file)
        return
    content = bytearray(file.read_bytes())
    kinds = [
        "flip",
        "flip",
        "cut",
        "insert",
        "empty",
        "zeros",
        "other",
        "gone",
        "folder",
        "text",
        "long",
        "pipe",
        "link",
    ]
    kind = chance.choice(kinds)
    if kind == "flip":
        for _ in range(chance.choice([1, 1, 3, 20])):
            content[chance.randrange(min(len(content), chance.choice([16, 200, 10**9])))] ^= 1 << chance.randrange(8)
    elif kind == "cut":
        del content[chance.randrange(len(content)) :]
    elif kind == "insert":
        content[(at := chance.randrange(len(content))) : at] = chance.randbytes(chance.choice([1, 7, 100]))
    elif kind == "empty":
        content.clear()
    elif kind == "zeros":
        content = bytearray(len(content))
    elif kind == "other":
        others = sorted(path for path in folder.rglob("*") if path.is_file())
        content = bytearray(chance.choice(others).read_bytes())
    elif kind == "text":
        content = bytearray(chance.choice([*SMALL, *LARGE]).encode(errors="replace"))
    elif kind == "long":
        content *= max(1, (3 << 20) // max(1, len(content)))
    file.unlink()
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    elif kind == "link":
        file.symlink_to(chance.choice([file.name, "nowhere", "/dev/zero", "/dev/null", "/proc/self/mem", "/"]))
    elif kind != "gone":
        file.write_bytes(content)


def _strange(chance: random.Random, key: str) -> Any:
    """Return a value of any type."""
    deep: Any = []
    for _ in range(chance.choice([3, 200])):
        deep = [deep]
    values = [
        None,
        True,
        0,
        -1,
        1.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "é\n",
        [],
        {},
        [None],
        {"a": None},
        {"1": []},
    ]
    values += [
        "os.system",
        {"class_path": "os.system"},
        {"class_path": []},
        {"class_path": "FedAvg", "init_args": []},
        deep,
    ]
    if key not in COSTLY:
        values += [2**63, 10**30, -(2**63), 1e308, "x" * 20_000, list(range(2000)), "1" * 400]
    return chance.choice(values)


def _change(chance: random.Random, value: Any, key: str = "") -> Any:
    """Return a tree of plain values with one place changed, removed or added."""
    inner = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    if not inner or chance.random() < 0.15:
        return _strange(chance, key)
    place = chance.choice(inner)
    copy = dict(value) if isinstance(value, dict) else list(value)
    act = chance.random()
    if act < 0.1:
        del copy[place]
    elif act < 0.2 and isinstance(copy, dict):
        copy[chance.choice(["x", "", "1", "class_path", "-1", "__class__"])] = _strange(chance, key)
    else:
        copy[place] = _change(chance, value[place], str(place) if isinstance(value, dict) else key)
    return copy


def _forge_yaml(chance: random.Random, file: Path) -> None:
    settings = yaml.safe_load(file.read_bytes())
    for _ in range(chance.choice([1, 1, 2, 4])):
        settings = _change(chance, settings)
    text = yaml.safe_dump(settings, sort_keys=False).encode()
    file.write_bytes(trust.sign(text) if chance.random() < 0.5 else text)


def _forge_json(chance: random.Random, file: Path) -> None:
    file.write_text(json.dumps(_change(chance, json.loads(file.read_bytes()))))


def _forge_csv(chance: random.Random, file: Path) -> None:
    lines = [line.split(",") for line in file.read_text().splitlines()]
    row = chance.choice(lines)
    act = chance.randrange(5)
    if act == 0:
        row[chance.randrange(len(row))] = chance.choice([*SMALL, *LARGE])
    elif act == 1:
        del row[chance.randrange(len(row))]
    elif act == 2:
        row.insert(chance.randrange(len(row)), chance.choice(SMALL))
    elif act == 3:
        lines.insert(chance.randrange(len(lines)), row)
    else:
        lines.remove(row)
    file.write_bytes("\n".join(map(",".join, [*lines, []])).encode(errors="surrogatepass"))


def _forge_tensors(chance: random.Random, file: Path) -> None:
    record, about = load_record(file)
    if chance.random() < 0.5:
        about = _change(chance, about)
    else:
        group = chance.choice(list(record))
        name = chance.choice(list(record[group]) or [""])
        tensor = record[group].get(name, torch.zeros(0))
        others: list[Callable[[], torch.Tensor]] = [
            lambda: tensor.double(),
            lambda: tensor.to(torch.int8),
            lambda: tensor.bool(),
            lambda: tensor.to(torch.bfloat16),
            lambda: tensor.to(torch.complex64),
            lambda: tensor * float("nan"),
            lambda: tensor.float() * 1e38,
            lambda: tensor.flatten()[:-1],
            lambda: tensor.unsqueeze(0),
            lambda: tensor[:0] if tensor.ndim else tensor,
            lambda: torch.zeros(()),
            lambda: -tensor.float(),
            lambda: torch.full_like(tensor, 10**6 if tensor.dtype == torch.long else 1),
        ]
        act = chance.random()
        if act < 0.1:
            del record[group]
        elif act < 0.2:
            record[group].pop(name, None)
        elif act < 0.3:
            record[chance.choice(["x", "", "weights", "a/b"])] = {chance.choice(["", "w", "é"]): tensor}
        else:
            record[group] = record[group] | {name: chance.choice(others)().contiguous()}
    save_record(file, record, about)


# --- running them


def prepare(folder: Path) -> None:
    """Make what the commands read: two runs, a discovery, a diagnosis, images; strange files beside."""
    torch.set_num_threads(1)
    for name, place in (("XDG_DATA_HOME", "data"), ("JDFL_CACHE", "cache")):
        os.environ[name] = str(folder / place)
    (folder / "work").mkdir(parents=True)
    os.chdir(folder / "work")
    tiny = [word for pair in TINY.items() for word in pair]
    graded = ["--algorithm", "SCAFFOLD", "--supervision", "graded", "--num_domains", "2"]
    diagnosis = ["--seeds", "0", "--batch_sizes", "128", "--max_epochs", "1"]
    rng = np.random.default_rng(0)
    for domain in ("ink", "chalk"):
        for label in ("0", "1"):
            place = Path("tree", domain, label)
            place.mkdir(parents=True)
            for number in range(4):
                pixels = rng.integers(0, 255, (12, 12, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(place / f"{number}.{'jpg' if number else 'png'}")
    with redirect_stdout(StringIO()):
        for words in (
            ["fit", *tiny, *graded, "--rounds", "2", "--run_dir", "run"],
            ["fit", *tiny, "--supervision", "base", "--run_dir", "base"],
            ["discover", *tiny, "--run_dir", "disc"],
            ["diagnose", *tiny, *diagnosis, "--run_dir", "diag"],
            ["test", "--run", "run"],
            ["predict", "--run", "run", "tree/ink/0"],
            ["report", "run", "base", "--output", "compared"],
        ):
            if command(words) != 0:
                raise SystemExit(f"a sound command fails: {shlex.join(words)}")
    Path("empty").mkdir()
    Path("letters.yaml").write_text("[a, b]")
    os.mkfifo("pipe")
    Path("loop").symlink_to("loop")
    Path("gone").symlink_to("nothing")
    os.chdir("/")


def serve_once(server: WatchServer, *_: object) -> None:
    """Give what a page would ask for, and end."""
    as_json(live_state(server.RequestHandlerClass.folder))  # type: ignore[attr-defined]


def no_answer(*_: object, **__: object) -> None:
    """Be a network without anybody."""
    raise urllib.error.URLError("no network in this trial")


def copy_world(source: Path, target: Path) -> None:
    """Copy a prepared folder, pipes and links included."""
    for place in (target, target.with_name(f"{target.name}.log")):
        shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(source, target, symlinks=True, ignore=shutil.ignore_patterns("pipe"))
    os.mkfifo(target / "work" / "pipe")


def contents(folder: Path) -> dict[str, bytes]:
    """Return what is in the files below a folder, and where links lead; nothing for folders and pipes."""
    found = {}
    for path in folder.rglob("*"):
        file = b"" if path.is_symlink() or not path.is_file() else path.read_bytes()
        found[str(path.relative_to(folder))] = os.fsencode(path.readlink()) if path.is_symlink() else file
    return found


def lost(words: Args, code: int, before: dict[str, bytes], after: dict[str, bytes]) -> Iterator[str]:
    """Give what a command changed that should change nothing, or only remove the folders of runs that it was given."""
    if words[:1] not in [[name] for name in _LOOKS]:
        return
    changed = {path for path in before.keys() | after.keys() if before.get(path) != after.get(path)}
    if words[:2] == ["runs", "rm"] and code == 0:
        gone = {os.path.normpath(word) for word in words[2:]}
        changed = {path for path in changed if path in after or not gone & {path, *map(str, Path(path).parents)}}
    yield from (f"changed: {path}" for path in sorted(changed)[:3])


def run_case(seed: int, number: int, source: Path, target: Path) -> tuple[Args, Ended, list[str]]:
    """Run a case; return its command, how it ended, and what is lost."""
    chance = random.Random(f"{seed} {number}")
    copy_world(source, target)
    os.environ["XDG_DATA_HOME"] = str(target / "data")
    words = fuzz_files(chance, target / "work") if number % 2 else fuzz_arguments(chance)
    words = [word.encode(errors="surrogatepass").decode(errors="surrogateescape") for word in words]
    before = contents(target / "work")
    ended = run_forked(partial(command, words), target, 60, (_MEMORY + 2048) << 20)
    return words, ended, list(lost(words, ended.code, before, contents(target / "work")))


def problems(words: Args, ended: Ended, usual: float) -> Iterator[str]:
    """Give all that is wrong with how a case ended."""
    yield from ended.problems()
    documented = [0, 2] + ([1] if words[:1] in (["test"], ["suite"]) else [])
    if not ended.hung and 0 <= ended.code not in documented and "Traceback" not in ended.errors:
        yield f"exit code {ended.code}"
    if ended.peak > usual + _MEMORY:
        yield f"{ended.peak:.0f} MiB of memory, {usual:.0f} of them before it began"


def main() -> None:
    """Try all cases, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=2000, help="with fewer than 2,000, no page is written")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="run this case alone, and show what it prints")
    options = parser.parse_args()
    WatchServer.serve_forever = serve_once  # type: ignore[method-assign]
    urllib.request.urlopen = no_answer
    counts: dict[str, Counter[str]] = {"arguments": Counter(), "files": Counter()}
    failed = 0
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place).resolve()
        prepare(folder / "source")
        usual = run_forked(lambda: 0, folder / "case").peak
        numbers = range(options.cases) if options.only is None else [options.only]
        for number in numbers:
            words, ended, changed = run_case(options.seed, number, folder / "source", folder / "case")
            if options.only is not None:
                print(f"{shlex.join(words)[:3000]}\n{ended.said}{ended.errors}exit code {ended.code}")
            wrong = [*problems(words, ended, usual), *changed]
            kind = counts["files" if number % 2 else "arguments"]
            kind["wrong" if wrong else str(ended.code)] += 1
            failed += bool(wrong)
            for problem in wrong:
                again = f"python benchmarks/fuzz.py --seed {options.seed} --only {number}"
                print(f"{again}  # {shlex.join(words)[:400]!a}: {problem!a}", flush=True)
            if number % 50 == 49:
                print(f"{number + 1} cases, {failed} of them wrong", flush=True)
    lines = [
        "| | cases | done (0) | differs or failed (1) | refused with one line (2) | wrong |",
        "|---|---|---|---|---|---|",
    ]
    names = {"arguments": "command lines", "files": "damaged and forged files"}
    for kind, found in counts.items():
        lines.append(
            f"| {names[kind]} | {found.total()} | {found['0']} | {found['1']} | {found['2']} | {found['wrong']} |"
        )
    if options.only is None and options.cases >= 2000:
        write_section("fuzz", "\n".join(lines), "robustness.md")
    else:
        print("\n".join(lines))
    if failed:
        raise SystemExit(f"{failed} cases are wrong")


if __name__ == "__main__":
    main()
