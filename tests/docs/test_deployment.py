"""examples/deploy: what the files say, the command takes; and the service runs as they run it, as far as a machine without their programs can tell."""

from __future__ import annotations

import argparse
import inspect
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml

from accel.cli import serve
from accel.integrations import fastapi

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "examples" / "deploy"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
SHORTEST_GRACE = 30
"""Seconds: 10 for the requests in flight, 10 for the batches, 10 for the device."""


def options(words: list[str]) -> argparse.Namespace:
    """Parse the words of a command, from `accel serve` on, as the command does."""
    begin = next(index for index, word in enumerate(words) if Path(word).name == "accel")
    assert words[begin + 1] == "serve"
    assert "accel" in PROJECT["scripts"]
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words[begin + 2 :])


def dockerfile() -> dict[str, str]:
    """Return the last value of each instruction."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", "")
    return dict(re.findall(r"^([A-Z]+) +(.*)$", text, re.MULTILINE))


def unit() -> dict[str, str]:
    return dict(re.findall(r"^([A-Za-z]+)=(.*)$", (DEPLOY / "accel-serve.service").read_text(), re.MULTILINE))


def manifest() -> dict[str, Any]:
    documents = {document["kind"]: document for document in yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())}
    assert documents.keys() == {"Deployment", "Service"}
    pod: dict[str, Any] = documents["Deployment"]["spec"]["template"]
    assert pod["metadata"]["labels"] == documents["Service"]["spec"]["selector"]
    return dict(pod["spec"])


def test_the_image_serves_with_options_that_there_are() -> None:
    found = dockerfile()
    entry = json.loads(found["ENTRYPOINT"])
    chosen = options([*entry, *json.loads(found["CMD"])])
    assert (entry[0], chosen.host, chosen.log_format) == ("tini", "0.0.0.0", "json")
    assert set(found["ARG"].partition("=")[2].split(",")) <= set(PROJECT["optional-dependencies"])
    assert found["EXPOSE"] == "8000"
    assert "http://127.0.0.1:8000/healthz" in found["HEALTHCHECK"]
    assert int(found["USER"].partition(":")[0]) > 0


def test_the_unit_ends_it_by_a_signal_to_the_service_alone() -> None:
    found = unit()
    assert options(shlex.split(found["ExecStart"])).port == 8000
    assert (found["KillMode"], found["OOMPolicy"], found["Restart"]) == ("mixed", "continue", "always")
    assert int(found["TimeoutStopSec"]) > SHORTEST_GRACE


def test_the_manifest_probes_what_is_there_and_waits_long_enough() -> None:
    pod = manifest()
    (container,) = pod["containers"]
    options([*json.loads(dockerfile()["ENTRYPOINT"]), *container["args"]])
    routes = inspect.signature(fastapi.install).parameters
    paths = {name: container[name]["httpGet"]["path"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    live, ready = routes["live"].default, routes["ready"].default
    assert paths == {"startupProbe": live, "readinessProbe": ready, "livenessProbe": live}
    assert {container[name]["httpGet"]["port"] for name in paths} == {container["ports"][0]["name"]}
    assert str(container["ports"][0]["containerPort"]) == dockerfile()["EXPOSE"]
    pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > SHORTEST_GRACE + pause
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    assert pod["securityContext"]["runAsNonRoot"] is True


def as_process_1() -> list[str]:
    """Return the command that makes what follows process 1 of its own namespace; none where that is not allowed."""
    command = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--mount-proc"]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
        return []
    return command


def asked(url: str, body: Any) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.loads(answer.read())


@pytest.mark.parametrize("prefix", [pytest.param(as_process_1(), id="as process 1, if that is allowed")])
def test_it_serves_through_a_fault_without_a_home_few_descriptors_and_what_can_be_written(prefix: list[str], tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    where = {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]),
        "HOME": "/nonexistent",
        "TMPDIR": "/nonexistent",
        "PYTHONUNBUFFERED": "1",
    }
    words = [*json.loads(dockerfile()["CMD"]), "--port", "0", "--device", "cpu", "--fault-at", "2"]
    limited = ["sh", "-c", 'ulimit -n 256 && exec "$@"', "sh", sys.executable, "-B", "-m", "accel", "serve", *words]
    with subprocess.Popen([*prefix, *limited], cwd=tmp_path, env=os.environ | where, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            found = re.search(r"http://[\d.]+:\d+", process.stdout.readline())
            assert found is not None
            sample = asked(f"{found[0]}/samples", 7)
            assert [asked(f"{found[0]}/digits", sample) for _ in range(2)] == 2 * [{"digit": sample["label"]}]
            with urllib.request.urlopen(f"{found[0]}/readyz", timeout=20) as answer:
                assert json.loads(answer.read())["generation"] == 2, "the fault was met, and survived"
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[0]) if prefix else process.pid, signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()
