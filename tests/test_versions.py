"""What pyproject.toml says of versions, the lock file and the continuous integration agree."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
JOBS = yaml.safe_load((ROOT / ".github/workflows/test.yml").read_text())["jobs"]
PYTHONS = sorted(
    {step["with"]["python-version"] for step in JOBS["everything"]["steps"] if "with" in step}
    | set(JOBS["quick"]["strategy"]["matrix"]["python"])
)
DIRECT = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS["test"])]


def locked() -> list[tuple[Requirement, list[str]]]:
    """Every package of the lock file, with its hashes."""
    found = []
    for entry in (ROOT / "requirements.lock").read_text().replace("\\\n", "").splitlines():
        if entry.strip() and not entry.lstrip().startswith("#"):
            package, *hashes = re.split(r"\s+--hash=", entry.strip())
            found.append((Requirement(package), hashes))
    return found


def holds(package: Requirement, python: str) -> bool:
    """Whether a package belongs on Linux with a version of Python."""
    where = {"python_version": python, "python_full_version": f"{python}.9", "implementation_version": f"{python}.9"}
    where |= {"sys_platform": "linux", "platform_system": "Linux", "platform_machine": "x86_64", "os_name": "posix"}
    return package.marker is None or package.marker.evaluate(where)


@pytest.mark.parametrize("python", PYTHONS)
def test_the_lock_file_has_one_version_within_each_bound(python: str) -> None:
    versions: dict[str, list[str]] = {}
    for package, _ in locked():
        if holds(package, python):
            (pin,) = package.specifier
            assert pin.operator == "=="
            assert not Version(pin.version).is_prerelease, package
            versions.setdefault(canonicalize_name(package.name), []).append(pin.version)
    for wanted in DIRECT:
        if holds(wanted, python):
            (version,) = versions[canonicalize_name(wanted.name)]
            assert version in wanted.specifier, f"{wanted}, but {version}: make lock"


def test_the_lock_file_has_hashes_and_no_place() -> None:
    """A version with a local label, such as 2.13.0+cpu, is no file of the public index."""
    packages = locked()
    assert len(packages) > 100
    for package, hashes in packages:
        assert hashes, package
        assert all(re.fullmatch(r"sha256:[0-9a-f]{64}", text) for text in hashes), package
        assert package.url is None
        assert "+" not in str(package.specifier)
    assert not re.search(r"://|^\s*-|[\s=]/", (ROOT / "requirements.lock").read_text().replace("    --hash=", ""))


def test_every_dependency_has_a_lowest_version() -> None:
    """`make lowest` would test a version of long ago otherwise."""
    for text in (*PROJECT["dependencies"], *(text for extra in EXTRAS.values() for text in extra)):
        assert any(part.operator == ">=" for part in Requirement(text).specifier), text


def test_the_tests_install_what_every_extra_does() -> None:
    assert {text for extra in EXTRAS.values() for text in extra} == set(EXTRAS["test"])


def test_pythons_that_are_claimed_are_tested() -> None:
    claimed = set(re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"])))
    assert claimed
    assert claimed <= set(PYTHONS)
    assert PROJECT["requires-python"] == f">={PYTHONS[0]}"
    page = (ROOT / "docs/install.md").read_text()
    assert f"Python {PYTHONS[0]} or newer" in page
