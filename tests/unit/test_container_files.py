"""The files of docker/ are what builders, docker compose and their linters expect."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent.parent
DOCKER = ROOT / "docker"


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def needed(extra: str) -> list[Requirement]:
    wanted = [Requirement(text) for text in (*PROJECT["dependencies"], *EXTRAS[extra])]
    own = [extra for one in wanted if one.name == PROJECT["name"] for extra in one.extras]
    return [one for one in wanted if one.name != PROJECT["name"]] + [r for e in own for r in needed(e)]


def torch_of_development() -> str:
    """The version that development, CI and the image use."""
    lines = (DOCKER / "requirements" / "torch.txt").read_text(encoding="utf-8").splitlines()
    [version] = [line.removeprefix("torch==") for line in lines if line.startswith("torch==")]
    return version


@pytest.mark.parametrize(
    ("lock", "extra"), [("image", "data"), ("test", "test"), ("check", "test"), ("check", "eval")]
)
def test_a_lock_has_what_the_project_needs_with_hashes_and_from_anywhere(lock: str, extra: str) -> None:
    folder = DOCKER / "requirements"
    text = (folder / f"{lock}.lock").read_text(encoding="utf-8")
    packages = re.split(r"\n(?=[a-z])", text.strip())
    assert len(packages) > 50
    for package in packages:
        assert re.fullmatch(r"[a-z0-9._-]+==[^ ]+( ; [^\\]+)?( \\\n    --hash=sha256:[0-9a-f]{64})+", package)
    lines = [line.rstrip(" \\") for line in text.splitlines() if "==" in line and not line.startswith(" ")]
    here = {"sys_platform": "linux", "platform_machine": "x86_64", "python_full_version": "3.11.7"}
    wanted = [one for one in map(Requirement, lines) if one.marker is None or one.marker.evaluate(here)]
    versions = {canonicalize_name(one.name): str(one.specifier).removeprefix("==") for one in wanted}
    assert not {"torch", "triton"} & set(versions)
    assert not any(name.startswith("nvidia-") for name in versions)
    versions[canonicalize_name("torch")] = torch_of_development()
    for one in needed(extra):
        if one.marker is None or one.marker.evaluate(here):
            assert one.specifier.contains(versions[canonicalize_name(one.name)]), one


def test_the_image_installs_by_the_hashes() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    assert "--no-deps --require-hashes -r image.lock" in text
    assert text.count("pip install") == 3  # that, torch, and the project itself without what it needs


def test_the_image_for_gpus_alone_has_what_compiling_needs() -> None:
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    last = text[text.rindex("\nFROM python") :]
    command = next(part for part in re.split(r"\n(?=[A-Z])", last) if part.startswith("RUN case"))
    assert '"${TORCH_INDEX}" in */cpu) exit 0' in command
    for package in ("gcc", "g++", "libc6-dev", "python3-dev"):
        assert f" {package}=" in command
    assert text.count("ARG TORCH_INDEX=") == 1  # one value for all stages
    assert "\nARG TORCH_INDEX\n" in last[: last.index("RUN case")]


def test_containers_can_write_to_their_volumes_alone_and_have_no_capabilities() -> None:
    services = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))["services"]
    own = [service for service in services.values() if "profiles" not in service]
    assert len(own) == 2
    for service in own:
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert "cap_add" not in service
        assert not service.get("privileged")
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["tmpfs"] == ["/tmp"]
    assert re.search(r"^USER 1000:1000$", (DOCKER / "Dockerfile").read_text(encoding="utf-8"), re.M)


def test_everything_that_the_dockerfile_copies_passes_dockerignore() -> None:
    copies = re.findall(
        r"^COPY (?!--from)(.*) \S+$", (DOCKER / "Dockerfile").read_text(encoding="utf-8"), re.M
    )
    allowed = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    copied = " ".join(copies).split()
    assert copied
    for path in copied:
        assert f"!{path}" in allowed
        assert (ROOT / path).exists()


def test_development_has_one_build_of_torch_and_users_keep_theirs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [wanted] = [Requirement(text) for text in project["dependencies"] if text.startswith("torch")]
    for version in ("2.11.0", torch_of_development(), "2.14.0"):
        assert wanted.specifier.contains(version)
    assert "--requirement $(LOCKS)/torch.txt" in (ROOT / "Makefile").read_text()
