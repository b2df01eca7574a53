"""Builds the wheel and the source archive; the wheel must hold every tracked file of the packages, and import.

It is installed in an environment of its own, which borrows the dependencies of the one that runs this script: a folder
named in a .pth file is searched for packages while its own .pth files, the editable install among them, are not read.
"""

import os
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from pathlib import Path

PACKAGES = ("linattn_jax", "pallas_kernels", "experiments", "configs")
CHECK = f"""
import importlib, sys
for name in {PACKAGES}:
    module = importlib.import_module(name)
    assert module.__file__.startswith(sys.prefix), f"{{name}} is taken from {{module.__file__}}"
"""


def run(*command, **options):
    """Runs a command whose failure ends this script."""
    return subprocess.run([str(part) for part in command], check=True, **options)


def main():
    """Builds, compares, installs, imports."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "build", "--outdir", folder, ".", stdout=subprocess.DEVNULL)
        (wheel,) = Path(folder).glob("*.whl")
        (_,) = Path(folder).glob("*.tar.gz")

        tracked = run("git", "ls-files", "-z", "--", *PACKAGES, capture_output=True, text=True).stdout
        missing = set(tracked.rstrip("\0").split("\0")) - set(zipfile.ZipFile(wheel).namelist())
        if missing:
            sys.exit(f"{wheel.name} lacks {', '.join(sorted(missing))}")

        clean = Path(folder) / "clean"
        venv.create(clean, with_pip=False)
        python = clean / "bin" / "python"
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = run(python, "-c", where, capture_output=True, text=True).stdout.strip()
        Path(site, "dependencies.pth").write_text(sysconfig.get_path("purelib") + os.linesep)
        run(python, "-I", "-c", CHECK, cwd=folder)
        run(sys.executable, "-m", "pip", "check")
        print(f"{wheel.name} holds the {len(tracked.split(chr(0))) - 1} files of its packages and imports on its own")


main()
