from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import io
import json
import logging
import os
import re
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

import aiohttp
import numpy as np
import pytest
from onnx import TensorProto, helper, save
from safetensors.numpy import save_file

import accel
from accel.cli import serve
from accel.cli.console import LoadingProgress
from accel.cli.digits import Model, load_digits
from accel.registry import find_device
from tests.device_support import bounded, child_pid, until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

CLIENTS = 60

MODULE = """
import contextlib
import accel
import numpy as np
from aiohttp import web
from fastapi import FastAPI
from tests.model_support import SEQUENCES, Affine, Mean, X

NUMBER = 3
WEIGHTS = {"w": np.ones((5, 3), np.float32), "b": np.zeros(3, np.float32), "version": np.array(1)}

async def model(device, on_progress=None):
    return await device.load_model(Affine, weights=WEIGHTS, inputs=X, buckets={"batch": (1, 4)}, on_progress=on_progress)

async def service(device):
    return accel.serve(await model(device), max_items=2)

@contextlib.asynccontextmanager
async def managed(device):
    async with accel.serve(await model(device)) as found:
        yield found

async def nothing(device):
    return 3

async def broken(device):
    raise LookupError("no weights")

def double(numbers):
    return 2 * np.asarray(numbers)

async def total(numbers):
    return {"sum": sum(numbers)}

asgi = FastAPI()
aio = web.Application()

@asgi.get("/hello")
async def hello():
    return "asgi"

async def hello_aio(request):
    return web.json_response("aiohttp")

aio.router.add_get("/hello", hello_aio)

@contextlib.asynccontextmanager
async def failing(app):
    raise LookupError("no start")
    yield

fails = FastAPI(lifespan=failing)
"""


def arguments(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    serve.add_arguments(parser)
    return parser.parse_args(words)


@contextlib.asynccontextmanager
async def running(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals, *words: str, said: list[str]
) -> AsyncIterator[aiohttp.ClientSession]:
    """Run the command in this process, and end it with a signal."""
    listening = asyncio.get_running_loop().create_future()
    monkeypatch.setattr(serve, "print", lambda text, **_: listening.set_result(text), raising=False)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(serve.run(arguments("--port", "0", *words)))
        try:
            line = await bounded(listening)
            said.append(line)
            found = re.search(r"http://[\d.]+:\d+", line)
            assert found is not None
            async with aiohttp.ClientSession(found[0], connector=aiohttp.TCPConnector(limit=0)) as session:
                yield session
        finally:
            os.kill(os.getpid(), number)
    assert task.result() == 0


@pytest.mark.parametrize("how", ["option", "environment"])
async def test_a_browser_is_shown_the_page_and_a_token_guards_what_is_for_operators(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    token = "a-token-of-16-or-more"
    if how == "environment":
        monkeypatch.setenv("ACCEL_ADMIN_TOKEN", token)
    words = ("--admin-token", token) if how == "option" else ()
    async with running(monkeypatch, signal.SIGTERM, "--device", "cpu", *words, said=[]) as session:
        async with session.get("/", headers={"Accept": "text/html,*/*"}, allow_redirects=False) as answer:
            assert (answer.status, answer.headers["Location"]) == (307, "accel")
        async with session.get("/") as answer:
            assert (await answer.text()).startswith("accel ")
        for path in ("/accel", "/accel/events", "/metrics"):
            async with session.get(path) as answer:
                assert answer.status == 401
            async with session.get(path, headers={"Authorization": f"Bearer {token}"}) as answer:
                assert answer.status == 200


async def test_no_request_is_lost_or_wrong_through_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = load_digits()
    async with accel.System() as system:
        model = await Model.load(await system.open_device("cpu"), digits)
    images = digits.held_out_images[:CLIENTS]
    expected = np.argmax(model.reference(images), axis=1).tolist()
    said: list[str] = []

    async with running(monkeypatch, signal.SIGTERM, "--device", "cpu", "--fault-at", "10", said=said) as session:

        async def client(image: list[float]) -> list[tuple[int, Any]]:
            answers = []
            for _ in range(3):
                async with session.post("/digits", json={"pixels": image}) as answer:
                    answers.append((answer.status, await answer.json()))
            return answers

        answers = await asyncio.gather(*(client(image.tolist()) for image in images))
        async with session.get("/readyz") as answer:
            assert await answer.json() == {"ok": True, "state": "ready", "generation": 2}
    assert answers == [[(200, {"digit": digit})] * 3 for digit in expected]
    assert said[0].startswith("Serving digits, samples on cpu:0 at http://127.0.0.1:")


async def test_collections_leave_out_what_was_there_when_it_began_to_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    before = gc.get_freeze_count()
    async with running(monkeypatch, signal.SIGTERM, "--device", "cpu", said=[]):
        assert gc.get_freeze_count() > before


async def test_what_is_no_image_is_refused_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    async with running(monkeypatch, signal.SIGINT, "--device", "cpu", said=said) as session:
        async with session.post("/samples", json=100_003) as answer:
            sample = await answer.json()
        assert set(sample) == {"pixels", "label"}
        async with session.post("/samples", json="x") as answer:
            assert answer.status == 422
        good = session.post("/digits", json=sample)
        wrong: list[Any] = [
            [],
            {},
            7,
            {"pixels": 3},
            {"pixels": [0.5] * 63},
            {"pixels": ["x"] * 64},
            {"pixels": [2.0] * 64},
            {"pixels": [[0.0] * 8] * 8},
        ]
        answers = await asyncio.gather(good, *(session.post("/digits", json=body) for body in wrong))
        assert [answer.status for answer in answers] == [200] + [422] * len(wrong)
        assert await answers[0].json() == {"digit": sample["label"]}
        assert {(await answer.json())["error"] for answer in answers[1:]} == {"InvalidArgumentError"}
        async with session.post("/digits", data=b"{", headers={"content-type": "application/json"}) as answer:
            assert answer.status == 422


async def test_a_taken_port_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert await serve.run(arguments("--device", "cpu", "--port", str(port))) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"accel: cannot listen on 127.0.0.1:{port}: Address already in use")
    assert said.count("\n") == 1


async def test_a_device_that_is_not_there_is_told_before_anything_starts() -> None:
    with pytest.raises(accel.BackendUnavailableError):
        await serve.run(arguments("--device", "cpu:99"))


@pytest.mark.parametrize(
    "words",
    [
        ["--port", "65536"],
        ["--port", "-1"],
        ["--port", "x"],
        ["--fault-at", "0"],
        ["--max-items", "0"],
        ["--max-delay", "-1"],
        ["--timeout", "0"],
        ["--max-connections", "0"],
        ["--head-timeout", "0"],
        ["--input", "x"],
        ["--input", "x=batch,5:floaty"],
        ["--input", "x=batch,5:int8:0.5"],
        ["--input", "x=batch,-5"],
        ["--buckets", "batch"],
        ["--buckets", "batch=1,x"],
        ["--log-format", "xml"],
    ],
)
def test_wrong_arguments_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        arguments(*words)
    assert left.value.code == 2
    assert words[0] in capsys.readouterr().err


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of a module in the current folder, of this test alone."""
    name = f"served_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    (tmp_path / f"{name}_imports.py").write_text("import there_is_none_of_this")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return name


@pytest.mark.parametrize("target", ["model", "service", "managed"])
async def test_what_a_function_of_the_device_returns_is_served(
    target: str, app: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], rng: np.random.Generator
) -> None:
    x, said = rng.standard_normal(5), list[str]()
    async with running(monkeypatch, signal.SIGTERM, "--device", "cpu", f"{app}:{target}", said=said) as session:
        async with session.post(f"/{target}", json={"x": x.tolist()}) as answer:
            assert answer.status == 200
            np.testing.assert_allclose((await answer.json())["y"], np.tanh([x.sum()] * 3), rtol=1e-5, atol=1e-5)
        async with session.post(f"/{target}", json={"x": [1]}) as answer:
            assert answer.status == 422
        async with session.get("/metrics") as answer:
            assert f'accel_requests_total{{device="cpu:0",model="{target}",outcome="answered"}} 1.0' in await answer.text()
        async with session.get("/openapi.json") as answer:
            assert set((await answer.json())["paths"]) == {f"/{target}", f"/{target}/list"}
    told = capsys.readouterr().err
    assert ("loading model: 0.0 of 0.0 MiB" in told) is (target == "model")
    assert ("warming up model: 2 of 2 buckets" in told) is (target == "model")


async def test_the_model_of_a_file_is_served(app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, made = (helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 3]) for name in "xy")
    graph = helper.make_graph([helper.make_node("Abs", ["x"], ["y"])], "test", [given], [made])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), tmp_path / "absolute.onnx")
    async with running(monkeypatch, signal.SIGTERM, "--device", "cpu", "absolute.onnx", said=[]) as session:
        answers = await asyncio.gather(*(session.post("/absolute", json={"x": [-1, n, 0.5]}) for n in range(20)))
        assert [await answer.json() for answer in answers] == [{"output": [1.0, float(n), 0.5]} for n in range(20)]


@pytest.mark.parametrize(
    ("words", "devices"),
    [
        (["--device", "cpu", "--replicas", "3"], ["cpu:0", "cpu:0#2", "cpu:0#3"]),
        (["--device", "cpu,cpu:0"], ["cpu:0", "cpu:0#2"]),
        (["--device", "all"], None),
    ],
)
async def test_a_model_is_served_on_several_devices(
    words: list[str], devices: list[str] | None, app: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [each.spec for each in find_device("auto")[0].devices()] if devices is None else devices
    said = list[str]()
    async with running(monkeypatch, signal.SIGTERM, *words, f"{app}:model", said=said) as session:
        assert f"on {', '.join(names)} at http" in said[0]
        bodies = [{"x": [1, 0, 0, 0, number / 100]} for number in range(40)]
        answers = await asyncio.gather(*(session.post("/model", json=body) for body in bodies))
        for answer, body in zip(answers, bodies, strict=True):
            np.testing.assert_allclose((await answer.json())["y"], np.tanh([sum(body["x"])] * 3), rtol=1e-5)
        async with session.get("/readyz") as answer:
            assert (answer.status, [*(await answer.json())["devices"]]) == (200, names)
        async with session.get("/metrics") as answer:
            shown = await answer.text()
            assert all(f'accel_device_ready{{device="{name}"}} 1.0' in shown for name in names)
        async with session.get("/") as answer:
            assert "; ".join(f"{name}, ready, generation 1" for name in names) in await answer.text()
    total = 2 * len(names)
    assert f"warming up model: {total} of {total} buckets" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["service", "managed", "nothing"])
async def test_several_devices_are_for_what_makes_a_model(target: str, app: str) -> None:
    with pytest.raises(accel.InvalidArgumentError, match=f"'{app}:{target}' made a .* Return the model"):
        await bounded(serve.run(arguments("--device", "cpu", "--replicas", "2", "--port", "0", f"{app}:{target}")))


async def test_several_functions_are_served_at_their_names(app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--device", "cpu", "--body-limit", "100", f"{app}:double", f"{app}:total")
    async with running(monkeypatch, signal.SIGTERM, *words, said=[]) as session:
        async with session.post("/double", json=[1, 2.5]) as answer:
            assert (answer.status, await answer.json()) == (200, [2.0, 5.0])
        async with session.post("/total", json=[1, 2]) as answer:
            assert (answer.status, await answer.json()) == (200, {"sum": 3})
        async with session.post("/total", json=[1] * 100) as answer:
            assert answer.status == 413
        async with session.post("/total", data=b"{", headers={"content-type": "application/json"}) as answer:
            assert answer.status == 422


AFFINE = ("--weights", "w.safetensors", "--input", "x=batch,5:float32", "--buckets", "batch=1,4")
TABLE = """
targets = ["{app}:Affine"]
weights = "w.safetensors"
input = {{x = "batch,5:float32"}}
buckets = {{batch = [1, 4]}}
device = "cpu"
access-log = false
"""


@pytest.mark.parametrize("how", ["words", "serve.toml", "pyproject.toml"])
async def test_a_model_is_served_by_what_the_command_or_a_file_says_of_it(
    how: str, app: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_file({"w": np.ones((5, 3), np.float32), "b": np.zeros(3, np.float32), "version": np.array(1)}, tmp_path / "w.safetensors")
    words: tuple[str, ...] = ("--device", "cpu", *AFFINE, f"{app}:Affine")
    if how != "words":
        table = TABLE.format(app=app)
        (tmp_path / how).write_text(f"[tool.accel.serve]\n{table}" if how == "pyproject.toml" else table)
        words = () if how == "pyproject.toml" else ("--config", how)
    with caplog.at_level("INFO", "accel"):
        async with running(monkeypatch, signal.SIGTERM, *words, said=[]) as session:
            async with session.post("/Affine", json={"x": [0.1] * 5}) as answer:
                np.testing.assert_allclose((await answer.json())["y"], np.tanh([0.5] * 3), rtol=1e-5)
            async with session.get("/") as answer:
                line = await answer.text()
    assert re.fullmatch(r"accel \S+ serves POST /Affine on cpu:0, ready, generation 1; see /docs, .*\n", line)
    events = [record.accel for record in caplog.records if hasattr(record, "accel")]
    (began,) = (event for event in events if event["event"] == "serving_began")
    assert (began["serves"], began["device"], began["host"], began["why"]) == ("Affine", "cpu:0", "inline", "--device cpu")
    assert began["config"] == (None if how == "words" else how)
    (ended,) = (event for event in events if event["event"] == "serving_ended")
    assert ended["reason"] == "SIGTERM"


@pytest.mark.parametrize(
    ("table", "text"),
    [
        ("speed = 9", "unrecognized arguments: --speed=9"),
        ("speed = false", "unrecognized arguments: --speed=False"),
        ("port = 'http'", "--port: must be a whole number"),
        ("targets = ['a:b']", "names what is served, and the command line too"),
        ("config = 'more.toml'", "config is no option of a file"),
        ("port = ", "serve.toml cannot be read"),
    ],
)
async def test_a_file_with_what_is_no_option_is_refused(
    table: str, text: str, app: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "serve.toml").write_text(table)
    words = ("x:y",) if "targets" in table else ()
    assert await serve.run(arguments("--config", "serve.toml", *words)) == 2
    told = capsys.readouterr().err
    assert text in told
    assert told.count("\n") == 1


@pytest.mark.parametrize("target", ["total", "asgi", "aio"])
async def test_the_log_has_a_json_line_for_each_request(
    target: str, app: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--access-log", "--log-format", "json", f"{app}:{target}")
    before = logging.getLogger().handlers[:]
    async with running(monkeypatch, signal.SIGINT, *words, said=[]) as session, session.get("/hello"):
        pass
    assert logging.getLogger().handlers == before
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
    events = [line["event"] for line in lines]
    assert [event for event in events if event != "context_ready"] == ["serving_began", "request", "serving_ended"]
    request = lines[events.index("request")]
    assert (request["level"], request["method"], request["path"]) == ("info", "GET", "/hello")
    assert request["status"] == (404 if target == "total" else 200)
    assert request["ms"] > 0
    assert lines[-1]["reason"] == "SIGINT"


async def test_the_log_of_what_is_served_stays_unless_it_is_told_otherwise(
    app: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running(monkeypatch, signal.SIGINT, f"{app}:asgi", said=[]):
        pass
    assert "serving_began" not in capsys.readouterr().err  # pytest has configured logging
    async with running(monkeypatch, signal.SIGINT, "--log-level", "info", f"{app}:asgi", said=[]):
        pass
    assert re.search(r"^\d\d:\d\d:\d\d INFO    accel: serving_began serves='asgi'", capsys.readouterr().err, re.MULTILINE)


@pytest.mark.parametrize(("target", "said_by"), [("asgi", "asgi"), ("aio", "aiohttp")])
async def test_an_application_is_served_as_it_is(target: str, said_by: str, app: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    async with running(monkeypatch, signal.SIGTERM, f"{app}:{target}", said=said) as session, session.get("/hello") as answer:
        assert await answer.json() == said_by
    assert said[0].startswith(f"Serving {target} at http://127.0.0.1:")


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["nowhere:model"], "no module 'nowhere'"),
        (["{app}:absent"], "has no 'absent'"),
        (["{app}:NUMBER"], "is a int that cannot be served"),
        (["{app}"], "names nothing to serve"),
        (["{app}:model", "{app}:model"], "have one name"),
        (["{app}:asgi", "{app}:model"], "is served alone"),
        (["--device", "cpu", "--standby", "imports", "--spares", "2", "{app}:asgi"], "takes no --standby, --spares, --device"),
        (["absent.onnx"], "no file absent.onnx"),
        (["{app}:Affine"], "is a model, whose inputs are not known. Give each: --input"),
        (["--weights", "w.safetensors", "{app}:model"], "is a function, which takes no --weights"),
        (["--input", "x=batch,5", "{app}:Affine", "{app}:model"], "is a function, which takes no --input"),
        (["--input", "x=batch,5", "{app}:Affine", "{app}:Mean"], "--input is for one model, and 2 are named"),
        (["--input", "x=batch,5"], "--input is for a model, and none is named"),
        (["--input", "x=batch,5", "--input", "x=batch,6", "{app}:Affine"], "--input is given twice"),
        (["--buckets", "batch=1", "--buckets", "batch=2", "{app}:Affine"], "--buckets is given twice"),
        (["--access-log", "--log-level", "error", "{app}:model"], "which --log-level error leaves out"),
        (["--buckets", "batch=1", "{app}:asgi"], "takes no --buckets"),
        (["--replicas", "2", "{app}:asgi"], "takes no --replicas"),
        (["--device", "cpu,cpu", "--replicas", "2", "{app}:model"], "--replicas 2 is given for cpu,cpu. Name as many devices"),
        (["--config", "absent.toml"], "absent.toml cannot be read"),
    ],
)
async def test_what_cannot_be_served_is_said_in_a_line(words: list[str], text: str, app: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert await serve.run(arguments(*(word.format(app=app) for word in words))) == 2
    told = capsys.readouterr().err
    assert told.startswith("accel: ")
    assert text in told
    assert told.count("\n") == 1


async def test_errors_of_what_is_served_are_its_own(app: str, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(LookupError, match="no weights"):
        await bounded(serve.run(arguments("--device", "cpu", "--port", "0", f"{app}:broken")))
    with pytest.raises(ModuleNotFoundError, match="there_is_none_of_this"):
        await bounded(serve.run(arguments("--device", "cpu", "--port", "0", f"{app}_imports:model")))
    assert await bounded(serve.run(arguments("--port", "0", f"{app}:fails"))) == 1


async def test_a_signal_while_a_model_is_loaded_ends_the_loading(app: str, tmp_path: Path) -> None:
    (tmp_path / f"{app}_slow.py").write_text(
        """
import asyncio
entered, left = asyncio.Event(), []
async def slow(device):
    entered.set()
    try:
        await asyncio.get_running_loop().create_future()
    finally:
        left.append(device)
"""
    )
    serving = asyncio.ensure_future(serve.run(arguments("--device", "cpu", "--port", "0", f"{app}_slow:slow")))

    def is_loading() -> bool:
        entered = getattr(sys.modules.get(f"{app}_slow"), "entered", None)  # it is imported on another thread
        return entered is not None and entered.is_set()

    await until(is_loading)
    os.kill(os.getpid(), signal.SIGINT)
    assert await bounded(serving) == 0
    assert sys.modules[f"{app}_slow"].left[0].state is accel.DeviceState.CLOSED


class Terminal(io.StringIO):
    """What is written to a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("out", [io.StringIO, Terminal])
def test_the_loading_of_weights_is_shown(out: type[io.StringIO]) -> None:
    shown = out()
    with LoadingProgress("embed", shown) as progress:
        for mib in range(0, 201, 5):
            progress.update("weights", mib << 20, 200 << 20)
        for done in range(4):
            progress.update("buckets", done, 3)
    text = shown.getvalue()
    assert "loading embed" in text
    assert ("200.0 of 200.0 MiB" if out is io.StringIO else "200.0/200.0 MiB") in text
    if out is io.StringIO:
        assert text.count("\n") == 11 + 4, "a line a tenth, and one for each bucket"
        assert "warming up embed: 2 of 3 buckets" in text
    else:
        assert "warming up embed" in text
        assert "3/3" in text


def test_a_model_without_weights_shows_no_loading() -> None:
    shown = Terminal()
    with LoadingProgress("embed", shown) as progress:
        progress.update("weights", 0, 0)
        progress.update("buckets", 0, 0)
    assert shown.getvalue() == ""


async def test_a_device_that_was_lost_comes_back_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[accel.Device] = []
    open_device = accel.System.open_device

    async def watched(*args: Any, **options: Any) -> accel.Device:
        opened.append(await open_device(*args, **options, restart=accel.RestartStrategy(max_restarts=0)))
        return opened[0]

    monkeypatch.setattr(accel.System, "open_device", watched)
    image = load_digits().held_out_images[0].tolist()
    async with running(monkeypatch, signal.SIGTERM, "--device", "cpu", "--device-host", "process", said=[]) as session:
        (device,) = opened
        os.kill(child_pid(device), signal.SIGKILL)
        await until(lambda: device.state is not accel.DeviceState.READY)
        await until(lambda: device.generation == 2)
        async with session.post("/digits", json={"pixels": image}) as response:
            assert response.status == 200, await response.text()
