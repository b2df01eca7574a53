"""The programs' start and end: one sentence for the user's mistakes, a traceback for bugs, the exit codes."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import app, flags
from absl.testing import flagsaver

from experiments import _main
from linattn_jax.types import UserError

CONFIG = """
import ml_collections
from linattn_jax.types import UserError

def get_config(arg=None):
    if arg == "size=huge":
        raise UserError("size=huge is unknown; known: tiny")
    if arg == "bug":
        raise KeyError("bug")
    config = ml_collections.ConfigDict()
    config.seed = 0
    config.model = {"mixers": ("kla",), "tied": True}
    config.optimizer = {"name": "adamw", "learning_rate": 1e-3}
    return config
"""


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Runs a main with a command line as a program would; gives the exit code. Flags are left as they were."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("LINATTN_TRACEBACK", raising=False)
    monkeypatch.setattr(_main, "_CONFIG_DEFAULTS", {})
    Path("lm.py").write_text(CONFIG)
    app.define_help_flags()  # it works once, so before the flags are saved
    saved = flagsaver.save_flag_values()

    def start(main, *arguments):
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(SystemExit) as stopped:
            _main.run(main)
        return stopped.value.code or 0  # None is how main returned

    yield start
    flagsaver.restore_flag_values(saved)
    flags.FLAGS.unparse_flags()


def raised(error):
    """The exception after a `raise` in this file."""
    try:
        raise error
    except type(error) as caught:
        return caught


def test_done_is_zero(start, capsys):
    seen = []
    assert start(seen.append) == 0
    assert seen == [["program"]]
    assert capsys.readouterr().err == ""


def test_a_user_error_is_one_sentence(start, capsys):
    def main(_):
        raise UserError("--data=/nowhere: no such folder")

    assert start(main) == 2
    assert capsys.readouterr().err == "error: --data=/nowhere: no such folder\n"


@pytest.mark.parametrize("way", ["flag", "environment"])
def test_the_traceback_on_demand(start, monkeypatch, way):
    def main(_):
        raise UserError("no")

    arguments = ["--traceback"] if way == "flag" else []
    if way == "environment":
        monkeypatch.setenv("LINATTN_TRACEBACK", "1")
    monkeypatch.setattr(sys, "argv", ["program", *arguments])
    with pytest.raises(UserError):
        _main.run(main)


def test_a_bug_is_raised(start, monkeypatch):
    def main(_):
        return {}["missing"]

    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(KeyError):
        _main.run(main)


def test_an_interrupt_is_130(start, capsys):
    def main(_):
        raise KeyboardInterrupt

    assert start(main) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


def test_a_stray_argument(start, capsys):
    assert start(lambda _: None, "steps=3") == 2
    assert capsys.readouterr().err == "error: unexpected argument 'steps=3': every option starts with two dashes\n"


def test_help_is_no_failure(start, capsys):
    assert start(lambda _: pytest.fail("main was called"), "--help") == 0


@pytest.mark.parametrize(
    ("argument", "sentence"),
    [
        ("--stpes=3", "there is no flag --stpes; did you mean --steps?"),
        ("--steps=many", "flag --steps=many: invalid literal for int() with base 10: 'many'"),
        ("--steps", "Missing value for flag --steps"),
    ],
)
def test_wrong_flags(start, capsys, argument, sentence):
    flags.DEFINE_integer("steps", 1, "Steps.", module_name="program")
    assert start(lambda _: None, argument) == 2
    assert capsys.readouterr().err == f"error: {sentence}\n"


def test_a_required_flag(start, capsys):
    flags.DEFINE_string("run_dir", None, "Where.", required=True)
    assert start(lambda _: None) == 2
    assert capsys.readouterr().err == "error: --run_dir must be given\n"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--config.optimizer.lr=1"], "there is no field --config.optimizer.lr; "
         "known: --config.optimizer.learning_rate, --config.optimizer.name"),
        (["--config.optimizer.learning_rat=1"], "there is no field --config.optimizer.learning_rat; "
         "did you mean --config.optimizer.learning_rate?"),
        (["--config.learning_rate=1"], "there is no field --config.learning_rate; "
         "did you mean --config.optimizer.learning_rate?"),
        (["--config.optimiser.learning_rate", "1"], "there is no field --config.optimiser.learning_rate; "
         "did you mean --config.optimizer.learning_rate?"),
        (["--config.optimizr.nam=lion"], "there is no field --config.optimizr.nam; did you mean "
         "--config.optimizer.name"),
        (["--config.model.mixers.first=kla"], "there is no field --config.model.mixers.first"),
        (["--noconfig.model.tide"], "there is no field --config.model.tide; did you mean --config.model.tied?"),
        (["--config.seed=one"], "flag --config.seed=one: invalid literal for int() with base 10: 'one'"),
        (["--config=lm.py:size=huge"], "size=huge is unknown; known: tiny"),
        (["--config=."], "there is no configuration file '.'"),
        (["--config=other.py"], "there is no configuration file 'other.py'"),
        (["--config", ""], "there is no configuration file ''"),
    ],
)  # fmt: skip
def test_wrong_configurations(start, capsys, arguments, sentence):
    _main.define_config("lm.py")
    assert start(lambda _: pytest.fail("main was called"), *arguments) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {sentence}")
    assert error.count("\n") == 1


def test_overrides_reach_the_configuration(start):
    config = _main.define_config("lm.py")
    seen = []
    arguments = ["--config.optimizer.learning_rate=0.5", "--noconfig.model.tied", "--config.model.mixers=('gla','kla')"]
    assert start(lambda _: seen.append(config.value), *arguments) == 0
    assert seen[0].optimizer.learning_rate == 0.5
    assert seen[0].model.tied is False
    assert seen[0].model.mixers == ("gla", "kla")


def test_the_file_on_the_command_line(start, capsys):
    config = _main.define_config("other.py")
    seen = []
    assert start(lambda _: seen.append(config.value.seed), "--config=lm.py", "--config.seed=7") == 0
    assert seen == [7]


def test_an_override_before_the_file(start, capsys):
    _main.define_config("other.py")
    assert start(lambda _: pytest.fail("main was called"), "--config.seed=7", "--config=lm.py") == 2
    assert capsys.readouterr().err == (
        "error: Found --config.seed=7 in argv before a value for --config was specified\n"
    )


def test_a_file_of_the_package_from_another_folder(start, monkeypatch, tmp_path):
    (tmp_path / "package" / "configs").mkdir(parents=True)
    (tmp_path / "package" / "configs" / "lm.py").write_text(CONFIG)
    monkeypatch.setattr(_main, "_ROOT", tmp_path / "package")
    config = _main.define_config("configs/lm.py")
    seen = []
    assert start(lambda _: seen.append(config.value.optimizer.name)) == 0
    assert seen == ["adamw"]


def test_a_bug_in_a_configuration_is_raised(start, monkeypatch):
    _main.define_config("lm.py:bug")
    monkeypatch.setattr(sys, "argv", ["program"])
    with pytest.raises(KeyError, match="bug"):
        _main.run(lambda _: None)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "a.txt"), "a.txt: no such file or directory"),
        (PermissionError(errno.EACCES, "Permission denied", b"a.txt"), "a.txt: permission denied"),
        (FileNotFoundError("no checkpoint in runs/a"), "no checkpoint in runs/a"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/a/x"),
         "the disk is full (runs/a/x): free some space, then run the same command again"),
        (RuntimeError("RESOURCE_EXHAUSTED: write failed: No space left on device [source=file_util.cc]"),
         "the disk is full: free some space, then run the same command again"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), None),
        (OSError(errno.EIO, "Input/output error", "a.txt"), None),
        (RuntimeError("broken invariant"), None),
        (TypeError("wants an int"), None),
        (AssertionError("broken invariant"), None),
        (ValueError("never raised"), None),
    ],
)  # fmt: skip
def test_whose_fault(error, sentence):
    assert _main.explain(error) == sentence


def test_a_full_disk_below_another_error():
    try:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise RuntimeError("the checkpoint failed") from error
    except RuntimeError as caught:
        assert _main.explain(caught).startswith("the disk is full")


@pytest.mark.parametrize("kind", [ValueError, NotImplementedError])
def test_an_argument_check_of_ours_is_the_users(monkeypatch, kind):
    assert _main.explain(raised(kind("q: rank 3, wanted 4"))) is None  # the tests are no part of the project's packages
    monkeypatch.setattr(_main, "_OURS", (str(Path(__file__).parent),))
    assert _main.explain(raised(kind("q: rank 3, wanted 4"))) == "q: rank 3, wanted 4"
    assert _main.explain(raised(TypeError("q: rank 3, wanted 4"))) is None


def test_a_value_error_from_below_is_a_bug(monkeypatch):
    monkeypatch.setattr(_main, "_OURS", (str(Path(__file__).parent),))
    for bug in (lambda: int("x"), lambda: np.zeros(3).reshape(2), lambda: (a := [1, 2])[:] and dict([a, 3])):
        with pytest.raises((ValueError, TypeError)) as caught:
            bug()
        assert _main.explain(caught.value) is None


def test_an_argument_check_under_jit(monkeypatch):
    monkeypatch.setattr(_main, "_OURS", (str(Path(__file__).parent),))

    @jax.jit
    def mixer(q):
        raise ValueError(f"q: rank {q.ndim}, wanted 4")

    with pytest.raises(ValueError, match="rank 1") as caught:
        mixer(np.zeros(3))
    assert _main.explain(caught.value) == "q: rank 1, wanted 4"


def test_as_a_program(tmp_path):
    (tmp_path / "lm.py").write_text(CONFIG)
    (tmp_path / "program.py").write_text(
        '"""A program."""\n'
        "from experiments._main import define_config, run\n"
        "CONFIG = define_config('lm.py')\n"
        "def main(_):\n"
        "    open(CONFIG.value.optimizer.name)\n"
        "run(main)\n"
    )
    path = os.pathsep.join([str(Path(_main.__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    finished = subprocess.run(
        [sys.executable, "program.py", "--config.optimizer.name=lion"],
        cwd=tmp_path, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (finished.returncode, finished.stdout, finished.stderr) == (
        2,
        "",
        "error: lion: no such file or directory\n",
    )
