"""A Python environment that has all packages of this one but meshwise and what only meshwise needs."""

import sysconfig
import venv
from pathlib import Path

_HIDDEN = ("meshwise", "msgspec", "typer", "rich")


def other_python(folder: Path) -> str:
    """Make the environment in `folder`; its Python."""
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    for found in {Path(sysconfig.get_path(name)) for name in ("purelib", "platlib")}:
        for package in found.iterdir():
            if not any(word in package.name for word in _HIDDEN) and package.suffix != ".pth":
                (packages / package.name).symlink_to(package)
    return str(folder / "bin" / "python")
