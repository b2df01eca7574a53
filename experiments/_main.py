"""How every program starts and fails: what the user got wrong is one sentence and exit code 2, a bug is a traceback.

A program defines its flags, then ends with `run(main)`:

    CONFIG = define_config("configs/lm.py")

    def main(_):
        train(CONFIG.value, ...)

    if __name__ == "__main__":
        run(main)

`--traceback`, or LINATTN_TRACEBACK=1 in the environment, shows where the sentence came from.
"""

from __future__ import annotations

import difflib
import dis
import errno
import logging
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from absl import app, flags
from ml_collections import ConfigDict, config_flags

from linattn_jax.types import UserError

flags.disclaim_key_flags()
flags.DEFINE_bool("traceback", False, "Show where an error came from.")

_ROOT = Path(__file__).resolve().parent.parent
_OURS = tuple(str(_ROOT / package) + os.sep for package in ("linattn_jax", "pallas_kernels", "experiments", "configs"))
_RAISE_VARARGS = dis.opmap["RAISE_VARARGS"]
# What the machine refuses because of what it was asked for: no such file, no permission, no space, and their kin.
_USER_ERRNOS = {
    errno.ENOENT, errno.EACCES, errno.EPERM, errno.EEXIST, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY,
    errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG,
}  # fmt: skip
_CONFIG_DEFAULTS: dict[str, str] = {}
_HELP = {"-?", "--help", "-help", "--helpshort", "-helpshort", "--helpfull", "-helpfull", "--helpxml", "-helpxml"}


def define_config(default: str, name: str = "config") -> flags.FlagHolder:
    """Defines `--config=FILE[:ARGUMENT]` and its overrides `--config.field=value`.

    The file's `get_config` is called with the argument where there is one. A path under `configs/` that the working
    directory does not have is taken from the installed package.

    Args:
        default: the file, with an argument if wanted, that is read when the command line names none.
        name: the flag's name.

    Returns:
        The flag's holder; its `.value` is the locked ConfigDict.
    """
    # The default is put on the command line by _parse and not given to the flag, which would read it, and fail on a
    # wrong override, while the program is still being imported.
    _CONFIG_DEFAULTS[name] = default
    return config_flags.DEFINE_config_file(name, default=None, help_string=f"Configuration (default: {default}).")


def run(main: Callable[[Sequence[str]], Any]) -> NoReturn:
    """Parses the flags, calls `main(argv)` and exits: 0 done, 1 a bug, 2 a mistake of the user's, 130 interrupted.

    Args:
        main: the program; gets the command line without its flags, which is the program's name alone.
    """
    # absl shows INFO of every library; of these it is for who looks for it, with --verbosity=1.
    if not any(argument.lstrip("-").startswith(("v=", "verbosity")) for argument in sys.argv[1:]):
        for name in ("jax", "linattn_jax", "matplotlib"):
            logging.getLogger(name).setLevel(logging.WARNING)
    environment = os.environ.get("LINATTN_TRACEBACK", "") not in ("", "0")
    show = environment or any(argument.lstrip("-") == "traceback" for argument in sys.argv[1:])

    def checked(rest: Sequence[str]) -> None:
        if len(rest) > 1:
            raise UserError(f"unexpected argument {rest[1]!r}: every option starts with two dashes")
        try:
            main(rest)
        except app.UsageError as error:
            raise UserError(str(error)) from error

    try:
        app.run(checked, flags_parser=_parse)
    except KeyboardInterrupt:
        if show:
            raise
        print("\ninterrupted", file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        sentence = explain(error)
        if sentence is None or show:
            raise
        print(f"error: {sentence}", file=sys.stderr)
        sys.exit(2)
    sys.exit(0)


def explain(error: BaseException) -> str | None:
    """One sentence for a mistake of the user's; None for a bug, whose traceback is wanted.

    The user's are: UserError; wrong flags; files that are missing, forbidden or of the wrong kind; a full disk,
    whichever library reports it; and a ValueError or NotImplementedError that a `raise` in this project states, since
    those are its argument checks. The same types from below (NumPy, JAX, `int("x")`) are bugs, as is every other type.
    """
    if isinstance(error, UserError):
        return _one_line(error)
    if isinstance(error, flags.Error):
        return _flag_sentence(error)
    cause: BaseException | None = error
    while cause is not None:
        if os.strerror(errno.ENOSPC) in str(cause) or getattr(cause, "errno", None) in (errno.ENOSPC, errno.EDQUOT):
            where = getattr(cause, "filename", None)
            return f"the disk is full{f' ({where})' if where else ''}: free some space, then run the same command again"
        cause = cause.__cause__ or cause.__context__
    if isinstance(error, OSError):
        if error.filename is not None and error.errno in _USER_ERRNOS:
            return f"{os.fsdecode(error.filename)}: {(error.strerror or 'cannot be used').lower()}"
        if isinstance(error, FileNotFoundError | PermissionError | IsADirectoryError | NotADirectoryError):
            return _one_line(error)
        return None
    if isinstance(error, ValueError | NotImplementedError) and _stated_by_us(error.__traceback__):
        return _one_line(error)
    return None


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _stated_by_us(traceback: TracebackType | None) -> bool:
    """Whether the innermost frame is this project's, stopped at a `raise` and not at an operation that failed."""
    if traceback is None:
        return False
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    code = traceback.tb_frame.f_code
    ours = os.path.abspath(code.co_filename).startswith(_OURS)
    return ours and code.co_code[traceback.tb_lasti] == _RAISE_VARARGS


def _parse(argv: Sequence[str]) -> list[str]:
    """Reads the command line, the configurations' part of it checked first."""
    argv = flags.FLAGS.read_flags_from_files(list(argv), force_gnu=False)
    if _HELP.intersection(argv):
        try:
            return flags.FLAGS(argv)
        except SystemExit:
            sys.exit(0)  # absl says 1
    for name, default in _CONFIG_DEFAULTS.items():
        argv = _check_config(argv, name, default)
    return flags.FLAGS(argv)


def _check_config(argv: list[str], name: str, default: str) -> list[str]:
    """The command line with `--name=FILE` in front, its file there and every override of a known field.

    ml_collections puts off the error of a missing file until the first use, and reports a wrong override as an
    AttributeError or TypeError, which could as well be a bug in the file.
    """
    value = default
    overrides = []
    kept = []
    arguments = iter(argv[1:])
    for argument in arguments:
        stem, equals, text = argument.partition("=")
        if argument == "--":
            kept += [argument, *arguments]
        elif stem in (f"--{name}", f"-{name}"):
            value = text if equals else next(arguments, "")
        else:
            kept.append(argument)
            if stem.lstrip("-").startswith((f"{name}.", f"no{name}.")) and stem.startswith("-"):
                overrides.append(stem.partition(".")[2])
    path, colon, text = value.partition(":")
    if not os.path.exists(path) and Path(path).parts[:1] == ("configs",) and (_ROOT / path).is_file():
        path = str(_ROOT / path)
    if not os.path.isfile(path):
        known = ", ".join(sorted(f"configs/{file.name}" for file in (_ROOT / "configs").glob("[!_]*.py")))
        raise UserError(f"there is no configuration file {path!r}" + (f"; known: {known}" if known else ""))
    get_config = runpy.run_path(path).get("get_config")
    if get_config is None:
        raise UserError(f"{path} is not a configuration file: it defines no get_config")
    fields = _fields(get_config(text) if colon else get_config())
    for override in overrides:
        if override not in fields:
            raise UserError(f"there is no field --{name}.{override}" + _near(override, fields, f"--{name}."))
    return [argv[0], f"--{name}={path}{colon}{text}", *kept]


def _fields(config: ConfigDict, prefix: str = "") -> list[str]:
    """The dotted names of a configuration's fields and groups."""
    fields = []
    for key, value in config.items(preserve_field_references=True):
        fields.append(f"{prefix}{key}")
        if isinstance(value, ConfigDict):
            fields += _fields(value, f"{prefix}{key}.")
    return fields


def _near(word: str, known: Sequence[str], prefix: str) -> str:
    """The end of a sentence about an unknown dotted name: the names that may have been meant, or those there are."""
    group, _, last = word.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == group}
    meant = [name for name in known if name.rpartition(".")[2] == last]
    meant += [siblings[name] for name in difflib.get_close_matches(last, siblings, n=3) if siblings[name] not in meant]
    if not meant and not siblings:
        meant = difflib.get_close_matches(word, known, n=3)
    if meant:
        return f"; did you mean {' or '.join(prefix + name for name in meant[:3])}?"
    names = siblings.values() or [name for name in known if "." not in name]
    return f"; known: {', '.join(prefix + name for name in names)}" if names else ""


def _flag_sentence(error: flags.Error) -> str:
    if isinstance(error, flags.UnrecognizedFlagError):
        program = sorted(flag.name for flag in flags.FLAGS.get_flags_for_module(sys.argv[0]))
        return f"there is no flag --{error.flagname}" + _near(error.flagname, program, "--")
    sentence = _one_line(error)
    if sentence.endswith("must have a value other than None."):
        return f"--{sentence.partition('--')[2].partition('=')[0]} must be given"
    return sentence
