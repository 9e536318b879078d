"""Result files that appear complete or not at all, in a place that was tried before the work began."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from ds41rt.errors import InputError


@contextmanager
def output_file(path: Path) -> Iterator[BinaryIO]:
    """A binary file that takes the place of `path` when the block ends well, and is gone when it does not.

    Raises `InputError` at once if nothing can be written there.
    """
    target = Path(os.path.realpath(path))
    if os.path.exists(target) and not (os.path.isfile(target) and os.access(target, os.W_OK)):
        raise InputError(f"{path}: exists and is not a file that can be written")
    partial = target.with_name(f".{target.name}.{uuid.uuid4().hex}.partial")
    try:
        file = partial.open("xb")
    except OSError as e:
        raise InputError(f"{path}: no file can be made in {target.parent}: {e.strerror}") from e
    try:
        with file:
            yield file
        partial.replace(target)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
