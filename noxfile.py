"""Sessions that set up all they need: ``python3 -m nox -s NAME``, arguments for the tool after ``--``."""

from __future__ import annotations

import ctypes
import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import nox

nox.needs_version = ">=2024.10.9"
nox.options.sessions = ["tests", "lint", "types", "docs"]
nox.options.reuse_venv = "yes"
nox.options.stop_on_first_error = False

PYPROJECT = nox.project.load_toml("pyproject.toml")
TYPED = ("accel", "accel_cuda", "tests", "examples", "benchmarks", "noxfile.py")
# Most tests wait for processes and timers; more than two at once wait for each other's processors, and measure those.
TWO_AT_ONCE = ("-n", "2", "--dist", "worksteal")
WITHOUT_SYSTEM_PACKAGES = "not gpu and not page"
# Tests start hundreds of children. Each would compile accel anew without its bytecode, and a second BLAS thread of each only takes turns with the other tests.
CHILDREN = {"PYTHONDONTWRITEBYTECODE": "", "OPENBLAS_NUM_THREADS": "1"}
ARRAY_API_TESTS = "55fcc60179efa2680ddd6cd926ddf17b83530e2b"
COVERAGE = ("--cov=accel", "--cov-branch", "--cov-report=term-missing:skip-covered", "--cov-fail-under=95")


def install(session: nox.Session, *, extras: str = "", groups: tuple[str, ...] = ()) -> None:
    """Install the dependency ``groups``, and with ``extras`` this checkout too, in place, so that tests see what is being edited."""
    # Resolved here and not with `pip --group`, which pips older than 25.1 do not know.
    requirements = list(nox.project.dependency_groups(PYPROJECT, *groups)) if groups else []
    # Python compiles what is imported, which is a small part of what is installed.
    session.install("--no-compile", *requirements, *(("-e", f".[{extras}]") if extras else ()))


@nox.session
def demo(session: nox.Session) -> None:
    """Serve real digits while a request kills what computes it, beside a plain asyncio service; the fastest way to see what this is."""
    session.install(".[cli]")
    # The demo closes its system on Ctrl-C; nox would kill it after 0.3 s.
    session.run("python", "-m", "accel", "demo", *session.posargs, interrupt_timeout=15.0, terminate_timeout=5.0)


@nox.session
def tests(session: nox.Session) -> None:
    """Run every test that needs no GPU and no browser; with arguments, run pytest with these alone: ``-- -m quick -n 2`` takes 90 s at most."""
    install(session, extras="cpu,web,cli,metrics", groups=("tests", "search"))
    session.run("pytest", *(session.posargs or ("-m", WITHOUT_SYSTEM_PACKAGES, *TWO_AT_ONCE)), env=CHILDREN)


@nox.session
def pages(session: nox.Session) -> None:
    """Drive the status page, and the page of an example, in Chromium, which is installed first where ``apt-get`` may."""
    if not (shutil.which("chromium") and shutil.which("chromedriver")):
        as_root = () if os.geteuid() == 0 else ("sudo", "-n")
        if shutil.which("apt-get") is None or (as_root and shutil.which("sudo") is None):
            session.error(
                "install Chromium and ChromeDriver first (Debian: apt-get install chromium chromium-driver), and run this session again"
            )
        session.run(*as_root, "apt-get", "update", "-qq", external=True)
        command = ("apt-get", "install", "-qq", "-y", "--no-install-recommends", "chromium", "chromium-driver")
        session.run(*as_root, "env", "DEBIAN_FRONTEND=noninteractive", *command, external=True, silent=True)
    install(session, extras="cpu,web,metrics,otel", groups=("pages", "search"))
    session.run("pytest", "-m", "page", *(session.posargs or ("tests/pages",)), env=CHILDREN)


@nox.session
def ray(session: nox.Session) -> None:
    """Run the tests of nodes in a Ray cluster, which is started here, of several Ray nodes; Ray is 80 MB to download."""
    install(session, extras="cpu,ray", groups=("ray",))
    session.run("pytest", *(session.posargs or ("tests/integrations/test_integrations_ray.py",)), env=CHILDREN)


@nox.session
def watch(session: nox.Session) -> None:
    """Serve ``examples/watched_service.py``: a page that shows a served model while you kill its process; PORT=8000, unless set."""
    install(session, extras="web,metrics,otel")
    session.run("python", "examples/watched_service.py", *session.posargs, interrupt_timeout=15.0, terminate_timeout=5.0)


@nox.session
def coverage(session: nox.Session) -> None:
    """Run the same tests, which take a third longer, and fail if they reach less than 95 % of the lines and branches."""
    install(session, extras="cpu,web,cli,metrics", groups=("tests", "search"))
    session.run("pytest", "-m", WITHOUT_SYSTEM_PACKAGES, *TWO_AT_ONCE, *COVERAGE, *session.posargs, env=CHILDREN)


@nox.session
def search(session: nox.Session) -> None:
    """Serve ``examples/semantic_search``: a page that searches the documentation of numpy, scipy and scikit-learn; PORT=8000, unless set."""
    install(session, extras="cpu,web", groups=("search",))
    session.run("python", "-m", "examples.semantic_search.app", *session.posargs, interrupt_timeout=15.0, terminate_timeout=5.0)


@nox.session(name="search-train")
def search_train(session: nox.Session) -> None:
    """Train the encoder of ``examples/semantic_search`` in minutes of CPU, and measure it; ``-- --seeds 0 1 2`` measures two more.

    An index may serve torch for CUDA under this pin, which is large; nothing here needs it.
    """
    install(session, groups=("search-train",))
    session.run("python", "-m", "examples.semantic_search.train", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting; ``ruff check --fix`` and ``ruff format`` repair most of what it finds."""
    install(session, groups=("lint",))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Type-check the packages, the tests, the examples, the benchmarks and this file."""
    install(session, extras="cpu,web,cli,metrics", groups=("types",))
    # mypy refuses a folder without Python files.
    targets = [name for name in TYPED if Path(name).is_file() or any(Path(name).rglob("*.py"))]
    session.run("mypy", "--strict", *(session.posargs or targets))


@nox.session
def package(session: nox.Session) -> None:
    """Build the sdist and, from it, the wheel; look into both, install the wheel without a checkout, and run the demo from it."""
    built = Path(session.create_tmp()).resolve() / "dist"
    shutil.rmtree(built, ignore_errors=True)
    session.install("build")
    session.run("python", "-m", "build", "--outdir", str(built), silent=True)
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    version = PYPROJECT["project"]["version"]
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
    if {name.partition("/")[0] for name in names} != {"accel", "accel_cuda", f"accel_actors-{version}.dist-info"}:
        session.error("the wheel has more, or less, than the two packages")
    if not {"accel/py.typed", "accel/cli/digits.npz", "accel/integrations/page.html", "accel_cuda/families/kernels/reduce.cu"} <= set(
        names
    ):
        session.error("the wheel lacks what is no Python")
    with tarfile.open(sdist) as source:
        folders = {name.split("/")[1] for name in source.getnames()}
    if not {*TYPED, "docs", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"} <= folders:
        session.error("the sdist cannot be tested: it lacks folders")
    session.install(f"{wheel}[cli]")
    session.install("--force-reinstall", "--no-deps", str(wheel))  # an earlier one of this version
    with session.chdir(session.create_tmp()):
        environment = {"PYTHONPATH": "", "PYTHONSAFEPATH": "1"}
        program = f"import accel; assert 'site-packages' in accel.__file__, accel.__file__; assert accel.__version__ == {version!r}"
        session.run("python", "-c", program, env=environment)
        session.run("accel", "demo", "--requests", "2000", "--clients", "32", env=environment)


@nox.session
def bench(session: nox.Session) -> None:
    """Measure every case that this machine can run beside its raw twin; ``-- --json FILE`` writes the numbers."""
    install(session, extras="cpu,web,cli")
    session.run("python", "benchmarks/run.py", *session.posargs, interrupt_timeout=15.0, terminate_timeout=5.0)


@nox.session
def chaos(session: nox.Session) -> None:
    """Serve 200 clients for a minute while faults arrive at random, and see that nothing is lost or left; ``-- --seed N`` repeats a run."""
    install(session, extras="cpu")
    session.run("python", "benchmarks/chaos.py", *session.posargs, env=CHILDREN)


@nox.session(name="array-api")
def array_api(session: nox.Session) -> None:
    """Run the test suite of the Python array API standard over expressions on the CPU; a known failure that passes is an error.

    The suite is cloned from GitHub; ARRAY_API_TESTS_SUITE names a checkout of it, with its submodule, to use instead.
    """
    install(session, extras="cpu", groups=("tests",))
    # Which examples a derandomized run takes depends on the version.
    session.install("hypothesis==6.170.15", "ndindex>=1.8", "pytest-json-report")
    given = os.environ.get("ARRAY_API_TESTS_SUITE")
    suite = Path(given) if given else Path(session.create_tmp()).resolve() / "array-api-tests"
    if not suite.exists():
        session.run("git", "clone", "--quiet", "https://github.com/data-apis/array-api-tests", str(suite), external=True)
    if not given:
        session.run("git", "-C", str(suite), "checkout", "--quiet", ARRAY_API_TESTS, external=True)
        session.run("git", "-C", str(suite), "submodule", "update", "--init", "--quiet", external=True)
    root = Path(__file__).resolve().parent
    environment = {"PYTHONPATH": str(root), "ARRAY_API_TESTS_MODULE": "exec('from tests.array_api.shim import xp')"}
    examples = session.posargs or ("--max-examples=20",)
    with session.chdir(suite):
        session.run(
            "pytest",
            "array_api_tests",
            "-q",
            "--disable-deadline",
            "--hypothesis-derandomize",
            "-o",
            "xfail_strict=true",
            f"--xfails-file={root / 'tests/array_api/xfails.txt'}",
            *examples,
            env=environment,
        )


@nox.session
def gpu(session: nox.Session) -> None:
    """Run the tests that need a CUDA device; fails where there is no driver, because a run of zero tests proves nothing."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        session.error(
            "no NVIDIA driver here (libcuda.so.1 does not load), so no GPU test can run. Run this session on a machine with an NVIDIA GPU "
            "and its driver; `python3 -m nox -s tests` runs everything that needs no GPU"
        )
    install(session, extras="cpu,web,cli,metrics,cuda", groups=("tests",))
    session.run("pytest", "-m", "gpu", *(session.posargs or ("tests/accel_cuda",)))


@nox.session
def hardware(session: nox.Session) -> None:
    """Make the record of a machine with a GPU: tests, budgets, service, demo, memcheck, kernels, in about 20 minutes; ``-- --list`` shows the parts."""
    install(session, extras="cpu,web,cli,metrics,bench,cuda", groups=("tests",))
    session.install("cupy-cuda13x", "torch")  # what is measured beside
    session.run("python", "benchmarks/hardware.py", *session.posargs)


@nox.session
def memcheck(session: nox.Session) -> None:
    """Run every CUDA kernel of the backend under compute-sanitizer, which comes with the CUDA toolkit; takes minutes."""
    install(session, extras="cpu,web,cli,metrics,cuda", groups=("tests",))
    session.run("python", "-m", "tests.accel_cuda.memcheck", *session.posargs)


@nox.session
def mutants(session: nox.Session) -> None:
    """Break the code in 100 places a room, and count what its tests notice; takes hours. ``-- actors --sample 20 --seed 7`` does less."""
    install(session, extras="cpu,web,cli,metrics", groups=("mutants",))
    session.run("python", "-m", "tests.mutants", *session.posargs, interrupt_timeout=15.0, terminate_timeout=5.0)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the site into ``site/``; a warning (dead link, unknown name) is an error. ``-- serve`` shows it while you write."""
    install(session, extras="cpu", groups=("docs",))
    session.run("mkdocs", *(session.posargs or ("build", "--strict")), env={"NO_MKDOCS_2_WARNING": "1"})
