"""The set-up script on machines that lack things: told by a PATH and a home folder made for each test."""

import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sh", "cat", "cksum", "cp", "grep", "mkdir", "mv", "rm", "sleep", "sort", "tail", "tr")

pytestmark = pytest.mark.skipif(os.name == "nt", reason="the set-up is a POSIX shell script")


def program(path: Path, text: str) -> Path:
    """Writes an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


class Machine:
    """A checkout in a folder with spaces, a PATH of few tools, an empty home."""

    def __init__(self, folder: Path):
        self.checkout = folder / "a check out"
        (self.checkout / ".ci").mkdir(parents=True)
        shutil.copy(ROOT / ".ci" / "setup", self.checkout / ".ci")
        shutil.copy(ROOT / ".ci" / "oldest.txt", self.checkout / ".ci")
        (self.checkout / "pyproject.toml").write_text("[project]\n")
        self.home = folder / "home"
        self.first = folder / "first on path"
        self.tools = folder / "tools"
        for empty in (self.home, self.first, self.tools):
            empty.mkdir()
        for tool in TOOLS:
            (self.tools / tool).symlink_to(shutil.which(tool))
        self.environment = {"HOME": str(self.home), "PATH": f"{self.first}:{self.tools}", "ACCELERATOR": "cpu"}

    def setup(self, *arguments, **environment):
        return subprocess.run(
            ["sh", ".ci/setup", *arguments],
            cwd=self.checkout, env=self.environment | environment, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def python(self, path: Path) -> Path:
        """A Python whose environments hold `inner` for a Python."""
        self.inner("exit 0")
        return program(
            path,
            f'if [ "$1" = -m ] && [ "$2" = venv ]; then mkdir -p "$3/bin"; cp \'{self.home}/inner\' "$3/bin/python"; '
            f"else exec '{sys.executable}' \"$@\"; fi",
        )

    def inner(self, pip: str) -> Path:
        """The Python inside the environments: says that it belongs to .venv, and pip is the given shell text."""
        return program(
            self.home / "inner",
            f'case "$*" in "-m pip install"*) echo "$*" >>../pip-calls; {pip} ;; '
            f"*sys.prefix*) echo {platform.python_version()} ;; *) exec '{sys.executable}' \"$@\" ;; esac",
        )

    def pip_calls(self) -> list[str]:
        calls = self.checkout.parent / "pip-calls"
        return calls.read_text().splitlines() if calls.exists() else []


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


BASE = str(Path(getattr(sys, "_base_executable", sys.executable)))


def test_nothing_to_run(machine):
    found = machine.setup("--find-only")
    assert found.returncode == 1
    assert found.stdout == ""
    assert found.stderr.startswith("setup: no Python 3.12, 3.13 or 3.14 that runs was found: install one")
    assert found.stderr.count("\n") == 1


def test_a_shim_that_fails_is_passed_over(machine):
    program(machine.first / "python3.12", "echo 'pyenv: python3.12: command not found' >&2; exit 127")
    program(machine.first / "python3.13", "exit 0")  # runs and says nothing
    program(machine.tools / "python3", f"exec '{sys.executable}' \"$@\"")
    found = machine.setup("--find-only")
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{BASE}\n", "")


def test_a_live_interpreter_behind_a_dead_shim(machine):
    program(machine.first / "python3.12", "exit 127")
    program(machine.tools / "python3.12", f"exec '{sys.executable}' \"$@\"")
    assert machine.setup("--find-only").stdout == f"{BASE}\n"


@pytest.mark.parametrize("variable", ["PYENV_ROOT", "HOME"])
def test_versions_that_pyenv_holds(machine, variable):
    root = machine.home / ("py env" if variable == "PYENV_ROOT" else ".pyenv")
    program(root / "versions" / "3.11.7" / "bin" / "python", "exit 1")
    program(root / "versions" / "3.12.0" / "bin" / "python", "exit 127")
    program(root / "versions" / "3.13.0" / "bin" / "python", f"exec '{sys.executable}' \"$@\"")
    environment = {"PYENV_ROOT": str(root)} if variable == "PYENV_ROOT" else {}
    assert machine.setup("--find-only", **environment).stdout == f"{BASE}\n"


def test_called_from_elsewhere_by_its_full_path(machine):
    mine = program(machine.checkout / "python", f"exec '{sys.executable}' \"$@\"")  # found by a path from the checkout
    found = subprocess.run(
        ["sh", str(machine.checkout / ".ci" / "setup"), "--find-only"],
        cwd=machine.home, env=machine.environment | {"PYTHON": f"./{mine.name}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert (found.returncode, found.stdout, found.stderr) == (0, f"{BASE}\n", "")


def test_an_old_python_is_passed_over(machine):
    old = "import sys; sys.version_info = (3, 11, 7, 'final', 0); exec(sys.argv.pop(1))"
    program(machine.first / "python3", f'[ "$1" = -c ] && exec \'{sys.executable}\' -c "{old}" "$2"')
    assert machine.setup("--find-only").returncode == 1


def test_a_python_that_cannot_make_environments(machine):
    bare = "import sys; sys.modules['ensurepip'] = None; exec(sys.argv.pop(1))"
    program(machine.first / "python3", f'[ "$1" = -c ] && exec \'{sys.executable}\' -c "{bare}" "$2"')
    found = machine.setup("--find-only")
    assert found.returncode == 1
    assert f"apt install python3.{sys.version_info.minor}-venv" in found.stderr


def test_uv_is_asked_last(machine):
    program(machine.first / "uv", f"[ \"$1 $2\" = 'python find' ] && echo '{sys.executable}'")
    assert machine.setup("--find-only").stdout == f"{BASE}\n"


def test_the_python_that_was_asked_for(machine):
    program(machine.tools / "python3", f"exec '{sys.executable}' \"$@\"")
    asked = program(machine.first / "mine", f"exec '{sys.executable}' \"$@\"")
    assert machine.setup("--find-only", PYTHON=str(asked)).stdout == f"{BASE}\n"
    missing = machine.setup("--find-only", PYTHON="python9")
    assert missing.returncode == 1
    assert missing.stderr.startswith("setup: PYTHON=python9 is not a Python 3.12, 3.13 or 3.14")


def test_unknown_options(machine):
    assert machine.setup("--fast").returncode == 2
    wrong = machine.setup(ACCELERATOR="npu")
    assert wrong.returncode == 1
    assert wrong.stderr == "setup: ACCELERATOR=npu is none of auto, cpu, cuda, cuda12, tpu.\n"


@pytest.fixture
def ready(machine):
    """A machine with a Python whose pip does nothing; the set-up has been done."""
    fake_base = machine.python(machine.home / "bin" / "python")
    # find_python prints the base interpreter, which would make a real environment: hand out the fake one.
    program(
        machine.first / "python3.12",
        f'if [ "$1" = -c ]; then case "$2" in *_base_executable*) echo \'{fake_base}\'; exit ;; esac; fi; '
        f"exec '{fake_base}' \"$@\"",
    )
    done = machine.setup("test")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "setup: ready."
    assert machine.pip_calls()[0].endswith("-e .[test]")
    return machine


def test_nothing_to_do(ready):
    for extras in ([], ["test"]):
        again = ready.setup(*extras)
        assert (again.returncode, again.stderr) == (0, "")
    assert len(ready.pip_calls()) == 1
    assert not (ready.checkout / ".venv-lock").exists()


def test_another_extra_is_added_to_those_there(ready):
    assert ready.setup("dev").returncode == 0
    assert [call.rpartition(" ")[2] for call in ready.pip_calls()] == [".[test]", ".[dev,test]"]


def test_the_oldest_versions_are_those_that_the_project_asks_for(machine):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    bounds = dict(
        re.match(r"([\w-]+)>=([\d.]+)$", line).groups()
        for line in project["dependencies"]
        if ">=" in line and ";" not in line
    )
    lines = (ROOT / ".ci" / "oldest.txt").read_text().splitlines()
    oldest = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert oldest.pop("jaxlib") == oldest["jax"]
    assert {"jax", "flax", "optax", "orbax-checkpoint"} == set(oldest)
    assert oldest == {name: bounds[name] for name in oldest}


def test_the_oldest_versions_are_installed(ready):
    assert "--constraint .ci/oldest.txt" in ready.pip_calls()[0]
    (ready.checkout / ".ci" / "oldest.txt").write_text("jax==9.9\n")
    assert ready.setup("test").stderr.splitlines()[-1] == "setup: ready."
    assert len(ready.pip_calls()) == 2


def test_the_newest_versions_have_an_environment_of_their_own(ready):
    for _ in range(2):  # it asks each time, since what is newest changes
        assert ready.setup("--latest", "test").returncode == 0
    calls = ready.pip_calls()
    assert len(calls) == 3
    for call in calls[1:]:
        assert "--constraint" not in call
        assert "--upgrade flax jax jaxlib optax orbax-checkpoint" in call
    assert (ready.checkout / ".venv-latest" / "setup-stamp").exists()
    assert ready.setup("test").stderr == ""  # the other is as it was
    assert len(ready.pip_calls()) == 3


def test_changed_dependencies(ready):
    (ready.checkout / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    (ready.checkout / ".venv" / "kept").touch()
    assert ready.setup().returncode == 0
    assert ready.pip_calls()[1].endswith(".[test]")
    assert (ready.checkout / ".venv" / "kept").exists()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("cut short", "an earlier set-up was cut short"),
        ("moved", "this folder was moved or copied from"),
        ("python gone", "the Python in .venv no longer works"),
        ("python dead", "the Python in .venv no longer works"),
    ],
)
def test_a_damaged_environment_is_made_again(ready, damage, said):
    venv = ready.checkout / ".venv"
    (venv / "stale").touch()
    if damage == "cut short":
        stamp = venv / "setup-stamp"
        stamp.write_text(stamp.read_text().replace("ready", "making"))
    elif damage == "moved":
        ready.checkout = ready.checkout.rename(ready.checkout.with_name("else where"))
    elif damage == "python gone":
        (venv / "bin" / "python").unlink()
    else:
        program(venv / "bin" / "python", "exit 1")
    again = ready.setup()
    assert again.returncode == 0, again.stderr
    assert said in again.stderr
    assert not (ready.checkout / ".venv" / "stale").exists()
    assert len(ready.pip_calls()) == 2
    assert ready.setup().stderr == ""


def test_a_broken_environment_of_another_origin_is_kept_aside(ready):
    venv = ready.checkout / ".venv"
    shutil.rmtree(venv)
    program(venv / "bin" / "python", "exit 1")
    assert "moving it to .venv-old" in ready.setup().stderr
    assert (ready.checkout / ".venv-old" / "bin" / "python").exists()
    assert ready.setup().stderr == ""


def test_an_environment_of_another_origin_is_used(ready):
    venv = ready.checkout / ".venv"
    (venv / "setup-stamp").unlink()
    (venv / "mine").touch()
    assert "using the .venv that is here" in ready.setup().stderr
    assert (venv / "mine").exists()


@pytest.mark.parametrize(
    ("output", "sentence"),
    [
        ("ERROR: Could not install packages: No space left on device", "the disk is full"),
        ("Failed to establish a new connection: [Errno -3] Temporary failure in name resolution",
         "pip could not reach the package index"),
        ("ERROR: No matching distribution found for jax>=0.11.2", "a package that is needed has no release"),
        ("ERROR: Failed building wheel for promise", "pip could not install the packages: ERROR: Failed building"),
    ],
)  # fmt: skip
def test_pip_fails(ready, output, sentence):
    shutil.rmtree(ready.checkout / ".venv")
    ready.inner(f"echo '{output}' >&2; exit 1")
    failed = ready.setup()
    assert failed.returncode == 1
    assert failed.stderr.splitlines()[-1].startswith(f"setup: {sentence}")
    assert not (ready.checkout / ".venv-lock").exists()
    ready.inner("exit 0")
    again = ready.setup()
    assert "an earlier set-up was cut short" in again.stderr
    assert again.returncode == 0


def test_a_dead_set_ups_lock_is_taken_over(ready):
    lock = ready.checkout / ".venv-lock"
    lock.mkdir()
    (lock / "pid").write_text("999999999\n")
    assert ready.setup("dev").returncode == 0
    assert not lock.exists()


@pytest.mark.parametrize(
    ("driver", "extra"), [("580.95.05", "cuda"), ("610.2", "cuda"), ("570.1", "cuda12"), ("470.2", ""), ("", "")]
)
def test_an_nvidia_driver_chooses_the_extra(ready, driver, extra):
    program(ready.first / "nvidia-smi", f"echo '{driver}'" if driver else "exit 9")
    assert ready.setup("dev", ACCELERATOR="auto").returncode == 0
    wanted = ",".join(sorted({"dev", "test", extra} - {""}))
    assert ready.pip_calls()[-1].endswith(f".[{wanted}]")
    assert ready.setup(ACCELERATOR="auto", PATH=str(ready.tools)).stderr == ""  # no GPU in sight: nothing is removed


def test_a_tpu_chooses_its_extra(ready):
    root = ready.home / "root"
    (root / "dev" / "vfio").mkdir(parents=True)
    (root / "dev" / "vfio" / "0").touch()
    assert ready.setup(ACCELERATOR="auto", SYSTEM_ROOT=str(root)).stderr == ""  # a device, but whose?
    vendor = root / "sys" / "bus" / "pci" / "devices" / "0000:00:04.0" / "vendor"
    vendor.parent.mkdir(parents=True)
    vendor.write_text("0x1ae0\n")
    assert ready.setup(ACCELERATOR="auto", SYSTEM_ROOT=str(root)).returncode == 0
    assert ready.pip_calls()[-1].endswith(".[test,tpu]")
