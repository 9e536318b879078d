"""npz archives of plain arrays, read strictly: a file that is missing, cut or something else is refused by name."""

import zipfile
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ds41rt.errors import InputError


def load_npz(path: Path, what: str) -> dict[str, NDArray[Any]]:
    """All arrays of the file by name. Raises `InputError`; `what` says in it what the file should be ("a trace")."""
    if not path.is_file():
        raise InputError(f"{path}: is missing, or not a file; give {what}")
    if not zipfile.is_zipfile(path):
        raise InputError(f"{path}: is not an npz file, or is cut short; give {what}")
    try:
        with np.load(path) as data:
            return dict(data)
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise InputError(f"{path}: cannot be read as {what}: {e}") from e
