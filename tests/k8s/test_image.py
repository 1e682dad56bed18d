"""The Dockerfile, whose steps are done in a folder in the place of an image: no Docker is needed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
STEP = re.compile(r"^(FROM|WORKDIR|COPY|ARG|RUN|ENV|USER|ENTRYPOINT|CMD) (.*)$")


def steps() -> list[tuple[str, str]]:
    """Each instruction and its words; a line that goes on is one with the next."""
    text = (ROOT / "Dockerfile").read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    found = [match.groups() for line in lines if (match := STEP.match(line))]
    assert len(found) == len(lines), "an instruction that this test does not know"
    return [(name, words) for name, words in found]


def test_the_image_is_as_the_operator_s_manifest_wants_it():
    found = steps()
    operator = next(
        o
        for o in yaml.safe_load_all((ROOT / "deploy/operator.yaml").read_text("utf-8"))
        if o["kind"] == "Deployment"
    )
    user = operator["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
    assert ("USER", str(user)) in found and f"useradd --uid {user}" in dict(found)["RUN"]
    for name, words in found:
        if name == "COPY" and "--from" not in words:
            assert all((ROOT / source).exists() for source in words.split()[:-1]), words
    pinned = re.findall(r"torch==(\S+)", (ROOT / "Dockerfile").read_text("utf-8"))
    assert pinned == re.findall(r"torch==(\S+)", (ROOT / "Makefile").read_text("utf-8"))


def test_all_that_is_copied_and_no_environment_is_sent_to_docker():
    lines = (ROOT / ".dockerignore").read_text("utf-8").splitlines()
    sent = {line[1:] for line in lines if line.startswith("!")}
    copied = {w for n, words in steps() if n == "COPY" and "--from" not in words for w in words.split()[:-1]}
    assert "*" in lines and sent == copied


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.timeout(1200)
def test_the_steps_of_the_image_build_an_operator_and_a_job(tmp_path):
    """Paths of the image are folders of this test; packages of the system are those of this machine."""
    image = str(tmp_path / "image")
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        **{k: v for k, v in os.environ.items() if k[:4] == "PIP_"},
    }
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    at = Path(image)

    def here(words: str) -> str:
        return re.sub(r"(?<![\w.])/(?=(opt|src|work)\b)", f"{image}/", words)

    for name, words in steps():
        match name:
            case "WORKDIR":
                at = Path(here(words))
                at.mkdir(parents=True, exist_ok=True)
            case "COPY" if "--from" not in words:
                *sources, target = words.split()
                to = at / here(target)
                for source in (ROOT / each for each in sources):
                    if source.is_dir():
                        shutil.copytree(source, to)
                    else:
                        shutil.copy(source, to)
            case "RUN" if "apt-get" not in words:
                subprocess.run(["bash", "-ec", here(words)], cwd=at, env=env, check=True, timeout=1000)
            case "ENV":
                for pair in shlex.split(here(words)):
                    key, _, value = pair.partition("=")
                    env[key] = value.replace("$PATH", env["PATH"])
            case "CMD":
                done = subprocess.run(
                    yaml.safe_load(words), cwd=at, env=env, capture_output=True, text=True, check=True
                )
                assert "Usage" in done.stdout
    found = shutil.which("meshwright", path=env["PATH"])
    assert found is not None and found.startswith(image)
    for command in (
        "meshwright k8s operator --help",
        "meshwright run --nproc 4 examples/demo.py --steps 3 --compared 1",
    ):
        done = subprocess.run(
            shlex.split(command), cwd=at, env=env, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
    where = [
        f"{image}/opt/meshwright/bin/python",
        "-P",
        "-c",
        "import meshwright; print(meshwright.__file__)",
    ]
    assert subprocess.run(where, env=env, capture_output=True, text=True, check=True).stdout.startswith(image)


def docker(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["docker", *words], cwd=ROOT, capture_output=True, text=True, timeout=1500)


@pytest.mark.slow
@pytest.mark.procs
@pytest.mark.timeout(1800)
def test_docker_builds_an_image_that_runs_as_its_user_and_cannot_write():
    """Takes its base image from a registry, or as it is there."""
    if shutil.which("docker") is None or docker("info").returncode != 0:
        pytest.skip("no daemon of Docker")
    built = docker("build", "--network=host", "--build-arg=PIP_EXTRA_INDEX_URL", "--tag=meshwright:test", ".")
    assert built.returncode == 0, built.stderr[-2000:]
    run = ("run", "--rm", "--network=host", "--read-only", "--tmpfs=/tmp", "meshwright:test")
    assert docker(*run, "id", "-u").stdout.strip() == "10001"
    assert docker(*run, "meshwright", "--version").stdout.startswith("meshwright ")
    assert "Usage" in docker(*run, "meshwright", "k8s", "operator", "--help").stdout
    demo = ("meshwright", "run", "--nproc", "4", "examples/demo.py", "--steps", "3", "--compared", "1")
    done = docker(*run, *demo)
    assert done.returncode == 0, done.stdout + done.stderr
