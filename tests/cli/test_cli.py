from __future__ import annotations

import asyncio
import io
import json
import logging
import re
import runpy
import signal
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from accel import BackendUnavailableError, DeviceDescription, LibraryError, System, __version__, cli
from accel.cli import console, devices, doctor, extras
from accel.cli.doctor import SelfTest, self_test
from accel.cli.main import COMMANDS, Command, main
from accel.cpu.backend import CpuBackend

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]

INTERRUPTED = """
import asyncio, signal, sys, threading, types
import accel
from accel.cli.main import COMMANDS, Command, main

async def run(arguments):
    async with accel.System() as system:
        device = await system.open_device("cpu", completion="sync")
        # Larger than what runs on the loop's thread, so that the device's own threads are there to be left behind.
        ref = await device.zeros((512, 512))
        await device.blas.gemm(ref, ref)
        print("ready", flush=True)
        await asyncio.get_running_loop().create_future()

sys.modules["waits"] = types.SimpleNamespace(add_arguments=lambda parser: None, run=run)
COMMANDS["demo"] = Command("waits", "")
code = main(["demo"])
print("threads", [thread.name for thread in threading.enumerate()], flush=True)
sys.exit(code)
"""


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[argparse.Namespace], Any]], None]:
    """Make ``accel demo`` run a function of the test."""

    def install(run: Callable[[argparse.Namespace], Any]) -> None:
        module = types.SimpleNamespace(add_arguments=lambda parser: parser.add_argument("--n", type=int, default=0), run=run)
        monkeypatch.setitem(sys.modules, "accel_test_command", module)
        monkeypatch.setitem(COMMANDS, "demo", Command("accel_test_command", "of the test"))

    return install


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_version_and_help_return_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"accel {__version__}\n"
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out and command.summary in out for name, command in COMMANDS.items())


@pytest.mark.parametrize("argv", [[], ["nonsense"], ["--nonsense"], ["devices", "--nonsense"]])
def test_wrong_arguments_return_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    assert "usage: accel" in capsys.readouterr().err


def test_help_imports_no_command() -> None:
    program = "import sys\nfrom accel.cli import main\nmain(['--help'])\nprint(sorted(m for m in sys.modules if m.startswith('accel.cli.')), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    assert done.stderr.strip() == "['accel.cli.extras', 'accel.cli.main']"


@pytest.mark.parametrize("is_async", [True, False])
def test_a_command_gets_its_arguments_and_gives_the_exit_code(is_async: bool, command: Callable[[Any], None]) -> None:
    async def run_async(arguments: argparse.Namespace) -> int:
        await asyncio.sleep(0)
        return int(arguments.n)

    def run(arguments: argparse.Namespace) -> int:
        return int(arguments.n)

    command(run_async if is_async else run)
    assert main(["demo", "--n", "7"]) == 7


def test_an_error_of_accel_is_a_message_and_1(command: Callable[[Any], None], capsys: pytest.CaptureFixture[str]) -> None:
    async def run(arguments: argparse.Namespace) -> int:
        raise LibraryError("no luck", code=3)

    command(run)
    assert main(["demo"]) == 1
    assert capsys.readouterr().err.startswith("accel: no luck [code=3]. ")


@pytest.mark.parametrize(
    ("missing", "install"),
    [
        ("rich.console", f"pip install -e '{ROOT}[cli]'"),
        ("starlette", f"pip install -e '{ROOT}[web]'"),
        ("aiohttp.web", f"pip install -e '{ROOT}[web]'"),
        ("uvloop", "pip install uvloop"),
    ],
)
def test_a_missing_extra_is_named_with_the_command_that_installs_it(
    missing: str, install: str, command: Callable[[Any], None], capsys: pytest.CaptureFixture[str]
) -> None:
    async def run(arguments: argparse.Namespace) -> int:
        raise ModuleNotFoundError("something else", name=missing)

    command(run)
    assert main(["demo"]) == 2
    printed = capsys.readouterr().err.replace("uv pip", "pip")  # as accel was installed here
    assert printed == f"accel: `accel demo` needs {missing}, which is not installed. Run: {install}\n"


@pytest.mark.parametrize("name", [None, "accel.cli.nothing", "json"])
def test_an_import_that_is_our_own_fault_is_not_hidden(name: str | None, command: Callable[[Any], None]) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise ImportError("a bug", name=name)

    command(run)
    with pytest.raises(ImportError, match="a bug"):
        main(["demo"])


def test_keyboard_interrupt_is_a_short_message_and_130(command: Callable[[Any], None], capsys: pytest.CaptureFixture[str]) -> None:
    def run(arguments: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    command(run)
    assert main(["demo"]) == 130
    assert capsys.readouterr() == ("", "accel: interrupted\n")


def test_the_module_runs_main_and_exits_with_its_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["accel", "--version"])
    with pytest.raises(SystemExit) as left:
        runpy.run_module("accel", run_name="__main__")
    assert left.value.code == 0
    assert capsys.readouterr().out == f"accel {__version__}\n"


def test_the_module_takes_ctrl_c_while_it_is_imported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted() -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "main", interrupted)
    with pytest.raises(SystemExit) as left:
        runpy.run_module("accel", run_name="__main__")
    assert left.value.code == 130
    assert capsys.readouterr() == ("", "accel: interrupted\n")


def test_ctrl_c_closes_the_system_and_leaves_no_thread() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "accel: interrupted\n")
    assert out == "threads ['MainThread']\n"


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    with subprocess.Popen(
        [sys.executable, "-m", "accel", "devices"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.stdout = None
        _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


# -- devices


def test_devices_lists_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["devices", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    cpu = next(device for device in listed if device["backend"] == "cpu")
    assert set(cpu) == {"spec", "backend", "index", "name", "uuid", "memory", "peers"}
    assert (cpu["spec"], cpu["peers"]) == ("cpu:0", [])
    assert main(["devices"]) == 0
    out = capsys.readouterr().out
    assert out.split()[:4] == ["spec", "name", "uuid", "memory"]
    assert cpu["uuid"] in out


def test_devices_says_whose_memory_a_device_can_reach(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    described = [DeviceDescription("cpu", index, "a", f"CPU-{index}") for index in range(3)]
    monkeypatch.setattr(CpuBackend, "can_access_peer", lambda _, index, other: index < 2 and other < 2, raising=False)
    monkeypatch.setattr(devices, "list_devices", lambda: {"cpu": described})
    assert main(["devices", "--json"]) == 0
    assert [device["peers"] for device in json.loads(capsys.readouterr().out)] == [["cpu:1"], ["cpu:0"], []]
    assert main(["devices"]) == 0
    assert capsys.readouterr().out.endswith("cpu:0 can reach the memory of cpu:1\ncpu:1 can reach the memory of cpu:0\n")


def test_devices_says_why_a_backend_has_none_and_returns_1_if_none_has(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = BackendUnavailableError("no driver.", remedy="Install it.")
    monkeypatch.setattr(devices, "list_devices", lambda: {"cuda": error})
    assert main(["devices"]) == 1
    assert capsys.readouterr() == ("", "cuda: no driver. Install it.\n")


def test_a_backend_that_cannot_be_used_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    class Backend:
        def devices(self) -> list[DeviceDescription]:
            return [DeviceDescription("good", 0, "thing", "U-1")]

    def load(name: str) -> Any:
        if name == "bad":
            raise BackendUnavailableError("gone")
        return Backend()

    monkeypatch.setattr(devices, "backend_names", lambda: ("bad", "good"))
    monkeypatch.setattr(devices, "load_backend", load)
    listing = devices.list_devices()
    assert isinstance(listing["bad"], BackendUnavailableError)
    assert listing["good"] == Backend().devices()
    assert devices.memory_text(0) == ""
    assert devices.memory_text(3 << 30) == "3.0 GiB"


# -- doctor


def test_doctor_tests_the_cpu_and_says_all_is_well(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert captured.err == "", "the fault of the self-test is meant to be, and must not be logged to the terminal"
    assert document["ok"] is True
    assert list(document["self_test_ms"]) == ["open", "gemm", "check", "fault", "recover", "close"]
    states = {check["name"]: check["state"] for check in document["checks"]}
    wanted = {"accel", "python", "system", "memfd", "timerfd", "pidfd", "uvloop", "backend cpu", "backend cuda", "self-test cpu"}
    assert wanted | {f"extra {extra}" for extra in extras.EXTRAS} | set(extras.CORE) <= states.keys()
    assert states["backend cpu"] == states["self-test cpu"] == states["numpy"] == "ok"


def test_doctor_prints_the_command_that_fixes_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "version_of", lambda distribution: None)
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    works, optional, broken = re.split(r"^(?:Optional, and not there|Broken)$", out, flags=re.MULTILINE)
    assert works.startswith("Works\n")
    assert "  backend cpu " in works
    assert f" pip install -e '{ROOT}[web]'\n" in optional
    assert " pip install uvloop\n" in optional
    assert f"pip install -e '{ROOT}[cuda]'" in optional.partition("  backend cuda ")[2]
    assert " pip install numpy\n" in broken
    assert "in a checkout" not in out
    long = [line for line in out.splitlines() if len(line) > 100 and "pip install" not in line]
    assert not long, "what is no command is wrapped"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"INSTALLER": "pip\n"}, "pip install 'accel-actors[web]'"),
        ({"INSTALLER": "uv"}, "uv pip install 'accel-actors[web]'"),
        ({"INSTALLER": "pip", "direct_url.json": '{"url": "file://HERE/a.whl"}'}, "pip install 'HERE/a.whl[web]'"),
        ({"INSTALLER": "pip", "direct_url.json": '{"url": "file://HERE/folder", "dir_info": {}}'}, "pip install 'HERE/folder[web]'"),
        ({"INSTALLER": "pip", "direct_url.json": '{"url": "file://HERE/gone.whl"}'}, "pip install 'accel-actors[web]'"),
        (None, "pip install 'accel-actors[web]'"),
    ],
    ids=["index", "uv", "wheel", "folder", "wheel that has gone", "not installed"],
)
def test_a_command_installs_as_accel_was_installed(
    files: dict[str, str] | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def distribution(name: str) -> types.SimpleNamespace:
        assert name == "accel-actors"
        if files is None:
            raise metadata.PackageNotFoundError(name)
        return types.SimpleNamespace(read_text=lambda file: files.get(file, "").replace("HERE", str(tmp_path)))

    (tmp_path / "a.whl").touch()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "pyproject.toml").touch()
    monkeypatch.setattr(extras, "_installation", extras._installation.__wrapped__)
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "accel" / "cli" / "extras.py"))
    monkeypatch.setattr(metadata, "distribution", distribution)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert extras.install_command("web") == expected.replace("HERE", str(tmp_path))
    assert extras.installable("In a checkout, run: pip install '.[web]'.") == expected.replace("HERE", str(tmp_path)) + "."
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\nuv = 0.9.1\n")
    (tmp_path / "pyproject.toml").touch()
    assert extras.install_command("web") == f"uv pip install -e '{tmp_path}[web]'"
    assert extras.install_command("uvloop") == "uv pip install uvloop"


@pytest.mark.parametrize("what", ["backend", "self-test"])
def test_doctor_returns_1_if_nothing_works(what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    async def fails(spec: str) -> SelfTest:
        return SelfTest({"open": 1.0}, "after open: it broke")

    if what == "backend":
        monkeypatch.setattr(doctor, "list_devices", lambda: {"cpu": BackendUnavailableError("gone", remedy="Do this."), "other": []})
    else:
        monkeypatch.setattr(doctor, "self_test", fails)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "cannot run accel yet" in out
    assert ("Do this." if what == "backend" else "after open: it broke") in out.partition("\nBroken\n")[2]


def test_doctor_reports_a_kernel_feature_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> int:
        raise PermissionError(1, "not allowed")

    monkeypatch.setattr("os.pidfd_open", refuse)
    found = {check.name: check for check in doctor.checks()}
    assert found["pidfd"].state == "failed"
    assert "not allowed" in found["pidfd"].detail
    assert found["pidfd"].remedy


async def test_self_test_tells_how_far_it_came(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any) -> None:
        raise AssertionError("the device computed a wrong product")

    monkeypatch.setattr(doctor, "_compare", wrong)
    test = await self_test("cpu")
    assert not test.is_ok
    assert test.failure == "after open, gemm: AssertionError: the device computed a wrong product"
    assert list(test.steps) == ["open", "gemm"]


def test_doctor_tests_other_devices_without_a_fault(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(doctor, "_usable_beside_the_cpu", lambda: ["cpu:0"])
    assert main(["doctor", "--json"]) == 0
    (found,) = (check for check in json.loads(capsys.readouterr().out)["checks"] if check["name"] == "self-test cpu:0")
    assert found["state"] == "ok"
    assert [step.split()[0] for step in found["detail"].split(", ")] == ["open", "gemm", "check", "close"]


async def test_self_test_sees_a_wrong_product() -> None:
    async with System() as system:
        device = await system.open_device("cpu")
        eye = await device.get(await device.full((3, 3), 2.0))
    doctor._compare(eye @ eye, eye, eye)
    with pytest.raises(AssertionError, match="wrong product"):
        doctor._compare(eye @ eye + 0.1, eye, eye)


async def test_self_test_ends_by_its_limit() -> None:
    test = await self_test("cpu", limit=0.0)
    assert "TimeoutError" in test.failure


# -- console


@pytest.fixture
def without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    for part in ("rich.console", "rich.table", "rich.markup", "rich.progress"):
        monkeypatch.setitem(sys.modules, part, None)


ROWS = [("a", "1.5 us"), ("[b]", "10")]
PLAIN = "title\nname   value\n----  ------\na     1.5 us\n[b]       10\n\n"


def test_a_table_for_a_pipe_is_plain_text() -> None:
    out = io.StringIO()
    console.print_table("title", ("name", "value"), ROWS, stream=out)
    assert out.getvalue() == PLAIN


def test_a_table_for_a_terminal_keeps_every_cell() -> None:
    pytest.importorskip("rich")
    out = Terminal()
    console.print_table("title", ("name", "value"), ROWS, stream=out)
    assert out.getvalue() != PLAIN
    assert all(cell in out.getvalue() for row in ROWS for cell in row)


@pytest.mark.usefixtures("without_rich")
def test_a_terminal_without_rich_gets_plain_text() -> None:
    out = Terminal()
    console.print_table("title", ("name", "value"), ROWS, stream=out)
    assert out.getvalue() == PLAIN


def test_progress_into_a_pipe_is_a_line_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    with console.progress(2) as shown:
        for step in ("one", "two"):
            shown.begin(step)
            shown.end()
    assert capsys.readouterr() == ("", "[1/2] one\n[2/2] two\n")


def test_progress_on_a_terminal_is_a_bar_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    out = Terminal()
    monkeypatch.setattr(sys, "stderr", out)
    with console.progress(2) as shown:
        assert shown._bar.live.auto_refresh is False
        shown.begin("one")
        shown.end()
    assert "1/2" in out.getvalue()


def test_quiet_log_takes_its_handler_back() -> None:
    logger = logging.getLogger("accel")
    before = list(logger.handlers)
    with console.quiet_log():
        assert len(logger.handlers) == len(before) + 1
    assert logger.handlers == before
