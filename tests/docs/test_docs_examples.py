"""README.md and the pages under docs/ say only what is true: their Python runs, their output comes out, their names and files exist.

How a page is run: all its ``python`` blocks, in order, in one namespace, on one event loop. A block is complete or continues the ones before it; it may
``await`` at its top level. One that calls ``asyncio.run`` is a script, and runs outside that loop. Comments in the Markdown, right before a block, say what
else there is to know:

- ``<!-- given: system, device -->``: the block, and those after it, find an open system and a CPU device under these names.
- ``<!-- not executed: reason -->``: the block is compiled only.
- ``<!-- output -->``, before a ``text`` block: the last Python block that was run printed this. Numbers may differ.

Blocks with ``title="name.py"`` are written to that file, in order, and not run: later blocks import it, and pytest runs it where it is called ``test_*.py``.
Entry points in a ``toml`` block are found as if that project were installed.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import importlib
import inspect
import io
import os
import re
import socket
import subprocess
import sys
import textwrap
import tomllib
import types
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import pytest

import accel
from accel.ops import families
from accel.registry import ENTRY_POINT_GROUP

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
WITH_REFERENCE = [*PAGES, *sorted((ROOT / "docs" / "reference").glob("*.md"))]

COMMENT = re.compile(r"^ *<!-- *(given|not executed|output)(?:: *(.*?))? *-->$")
FENCE = re.compile(r"^( *)```(\w+)?(.*)$")
TITLE = re.compile(r'title="(\w+\.py)"')
NAME = re.compile(r"(?<![\w./-])accel(?:\.[A-Za-z_]\w*)+")
TRACED = re.compile(r"accel\.(request|batch|service|generation|error)\b")  # spans and attributes of traces
NUMBER = re.compile(r"\d+(?:[.,:]\d+)*(?:e[-+]?\d+)?")
LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)")
TESTS = re.compile(r"`(tests/[\w/.]+)`")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    title: str | None
    text: str
    given: tuple[str, ...]
    skip: str | None
    is_output: bool

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def compiled(self) -> types.CodeType:
        # Empty lines before it make a traceback name the line of the page.
        source = "\n" * self.line + self.text
        code: types.CodeType = compile(source, str(self.page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        return code


def blocks(page: Path, text: str | None = None) -> Iterator[Block]:
    """Yield the fenced blocks of a page, each with what the comments before it say."""
    marks: dict[str, str] = {}
    opened: tuple[int, str, str, str] | None = None
    body: list[str] = []
    for number, line in enumerate((page.read_text(encoding="utf-8") if text is None else text).splitlines(), 1):
        fence, comment = FENCE.match(line), COMMENT.match(line)
        if opened is not None:
            if fence and fence[1] == opened[1] and not fence[2] and not fence[3]:
                start, _, language, info = opened
                title = TITLE.search(info)
                given = tuple(name.strip() for name in marks.get("given", "").split(",") if name.strip())
                source = textwrap.dedent("\n".join(body)) + "\n"
                yield Block(page, start, language, title and title[1], source, given, marks.get("not executed"), "output" in marks)
                opened, marks = None, {}
            else:
                body.append(line)
        elif fence:
            opened, body = (number, fence[1], fence[2] or "", fence[3]), []
        elif comment:
            marks[comment[1]] = comment[2] or ""
        elif line.strip():
            marks = {}
    assert opened is None, f"{page}: the block in line {opened and opened[0]} does not end"


class PageRunner:
    """The namespace and the event loop of one page."""

    def __init__(self, page: Path) -> None:
        name = f"page_{page.stem.replace('-', '_').lower()}"
        self.module = types.ModuleType(name)
        self.files: dict[str, Path] = {}
        self.printed = ""
        self._runner = asyncio.Runner()
        self._system: accel.System | None = None

    def __enter__(self) -> Self:
        # Dataclasses and pickles look their module up.
        sys.modules[self.module.__name__] = self.module
        return self

    def __exit__(self, *_: object) -> None:
        try:
            if self._system is not None:
                self._runner.run(self._system.aclose())
        finally:
            self._runner.close()
            for name in (self.module.__name__, *(file.stem for file in self.files.values())):
                sys.modules.pop(name, None)

    def run(self, block: Block) -> None:
        if block.given:
            self._runner.run(self._give(block.given))
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if "asyncio.run(" in block.text:  # a script, which brings a loop of its own
                with self._as_main():
                    eval(block.compiled(), vars(self.module))
            else:
                self._runner.run(self._evaluate(block))
        self.printed = out.getvalue()

    def write(self, block: Block, folder: Path) -> None:
        block.compiled()
        file = self.files.setdefault(str(block.title), folder / str(block.title))
        with file.open("a", encoding="utf-8") as end:
            end.write(f"\n\n{block.text}" if end.tell() else block.text)

    @contextlib.contextmanager
    def _as_main(self) -> Iterator[None]:
        """Let the page be what ``if __name__ == "__main__"`` asks for inside the block."""
        name, self.module.__name__ = self.module.__name__, "__main__"
        try:
            yield
        finally:
            self.module.__name__ = name

    async def _evaluate(self, block: Block) -> None:
        outcome: Any = eval(block.compiled(), vars(self.module))
        if inspect.iscoroutine(outcome):
            await outcome

    async def _give(self, names: tuple[str, ...]) -> None:
        if self._system is None:
            self._system = await accel.System().__aenter__()
        offers = {"system": self._system, "device": await self._system.open_device("cpu") if "device" in names else None}
        vars(self.module).update({name: offers[name] for name in names})


def install_entry_points(text: str, folder: Path) -> None:
    """Make a project known to ``importlib.metadata`` as an installer would."""
    project = tomllib.loads(text).get("project", {})
    if groups := project.get("entry-points"):
        info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        info.mkdir()
        info.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n")
        lines = [f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items()) for group, points in groups.items()]
        info.joinpath("entry_points.txt").write_text("\n".join(lines))


def comparable(output: str) -> list[str]:
    """Return the words of an output, with every number made the same."""
    return NUMBER.sub("0", output).split()


def run_page(page: Path, folder: Path, text: str | None = None) -> int:
    """Run a page and return how many of its blocks were executed."""
    executed = 0
    with PageRunner(page) as runner:
        for block in blocks(page, text):
            if block.language == "python" and block.skip is not None:
                assert block.skip, f"{block.where}: say why it is not executed"
                block.compiled()
            elif block.language == "python" and block.title is not None:
                runner.write(block, folder)
            elif block.language == "python":
                runner.run(block)
                executed += 1
            elif block.language == "toml":
                install_entry_points(block.text, folder)
            elif block.is_output:
                assert comparable(runner.printed) == comparable(block.text), f"{block.where}: it printed\n{runner.printed}"
        run_pytest([file for name, file in runner.files.items() if name.startswith("test_")], folder)
    return executed


def run_pytest(files: list[Path], folder: Path) -> None:
    """Run the test files of a page in a pytest of their own, configured as the pages say."""
    if files:
        (folder / "pytest.ini").write_text("[pytest]\nasyncio_mode = auto\n")
        paths = os.pathsep.join([str(ROOT), str(folder)])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)]
        done = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths}, cwd=folder, timeout=50, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def resolves(name: str) -> bool:
    """Whether ``accel.a.b`` is a module, or an attribute of one, however deep."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            if (
                not hasattr(found, part)
                and part not in getattr(found, "__annotations__", {})
                and part not in getattr(found, "__slots__", ())
            ):
                return False
            found = getattr(found, part, None)
        return True
    return False


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_python_of_a_page_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    run_page(page, tmp_path)


@pytest.mark.parametrize("page", WITH_REFERENCE, ids=lambda page: page.name)
def test_every_name_of_accel_on_a_page_exists(page: Path) -> None:
    names = set(NAME.findall(page.read_text(encoding="utf-8"))) - {ENTRY_POINT_GROUP, families.ENTRY_POINT_GROUP}
    assert sorted(name for name in names if not resolves(name) and not TRACED.match(name)) == []


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the commands of a console block, each with the lines that it prints."""
    for part in ("\n" + text).split("\n$ ")[1:]:
        command, *printed = part.splitlines()
        yield command, printed


def test_the_commands_of_the_readme_print_what_is_shown(tmp_path: Path) -> None:
    """A server goes on while the commands below it ask it. Setting up, which `.ci/run` does, is left out."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = str(taken.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(tmp_path)])}
    ran = 0
    with contextlib.ExitStack() as stack:
        for block in blocks(ROOT / "README.md"):
            if block.title is not None:
                (tmp_path / block.title).write_text(block.text)
            for command, printed in commands(block.text) if block.language == "console" else ():
                as_here = command.replace("python -m accel serve", f"exec {sys.executable} -m accel serve --port {port}").replace(
                    "8000", port
                )
                process = stack.enter_context(
                    subprocess.Popen(as_here, shell=True, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, text=True)
                )
                stack.callback(process.terminate)
                assert process.stdout is not None
                shown = "".join([process.stdout.readline() for _ in printed])
                assert comparable(shown) == comparable("\n".join(printed)), command
                ran += 1
    assert ran == 2


def test_the_files_that_the_readme_names_exist() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    named = {*LINK.findall(text), *TESTS.findall(text)}
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


@pytest.mark.parametrize("page", PAGES[1:], ids=lambda page: page.name)
def test_the_tests_that_a_page_names_exist(page: Path) -> None:
    named = TESTS.findall(page.read_text(encoding="utf-8"))
    assert sorted(name for name in named if not (ROOT / name).exists()) == []


def test_a_failing_example_fails_and_names_its_line(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    with pytest.raises(ZeroDivisionError) as caught:
        run_page(page, tmp_path, "text\n\n```python\nx = 1\n```\n\n```python\nimport asyncio\n\nawait asyncio.sleep(0)\nx / 0\n```\n")
    assert (str(caught.traceback[-1].path), caught.traceback[-1].lineno + 1) == (str(page), 11)


def test_another_output_than_the_one_shown_fails(tmp_path: Path) -> None:
    shown = "```python\nprint('took', 12.5, 'ms')\n```\n\n<!-- output -->\n```text\ntook {} ms\n```\n"
    assert run_page(ROOT / "README.md", tmp_path, shown.format("7")) == 1
    with pytest.raises(AssertionError, match="it printed"):
        run_page(ROOT / "README.md", tmp_path, shown.format("no"))


def test_a_block_that_is_not_executed_must_compile_and_say_why(tmp_path: Path) -> None:
    page = ROOT / "README.md"
    assert run_page(page, tmp_path, "<!-- not executed: needs a GPU -->\n```python\n1 / 0\n```\n") == 0
    with pytest.raises(SyntaxError):
        run_page(page, tmp_path, "<!-- not executed: needs a GPU -->\n```python\n1 +\n```\n")
    with pytest.raises(AssertionError, match="say why"):
        run_page(page, tmp_path, "<!-- not executed: -->\n```python\n1\n```\n")


@pytest.mark.parametrize("name", ["accel.Sistem", "accel.device.nothing", "accel.errors.AccelError.remedies"])
def test_a_wrong_name_is_noticed(name: str) -> None:
    assert not resolves(name)


@pytest.mark.parametrize("name", ["accel", "accel.System.open_device", "accel.completion.poller", "accel.AccelRef.generation"])
def test_a_right_name_is_found(name: str) -> None:
    assert resolves(name)
