"""Loggers that print nothing until the application asks for it.

structlog without configuration prints every event to stdout, which a library must not do. An event therefore goes to
structlog where the application has configured it (the command line does), and to the standard library's logger of the
same name where it has not: there the usual rules hold, and an event below the level costs one test, no formatting.
"""

import logging
from typing import Any

import structlog

# Without this, warnings of an application that configured no logging at all would appear on its stderr.
logging.getLogger("ds41rt").addHandler(logging.NullHandler())


class Logger:
    """Events with named values: `log.info("segment captured", owner=3, end=7)`."""

    __slots__ = ("_plain", "_structured")

    def __init__(self, name: str) -> None:
        self._plain = logging.getLogger(name)
        self._structured: Any = structlog.get_logger(name)

    def debug(self, event: str, **values: Any) -> None:
        if structlog.is_configured():
            self._structured.debug(event, **values)
        elif self._plain.isEnabledFor(logging.DEBUG):
            self._write(logging.DEBUG, event, values)

    def info(self, event: str, **values: Any) -> None:
        if structlog.is_configured():
            self._structured.info(event, **values)
        elif self._plain.isEnabledFor(logging.INFO):
            self._write(logging.INFO, event, values)

    def warning(self, event: str, **values: Any) -> None:
        if structlog.is_configured():
            self._structured.warning(event, **values)
        elif self._plain.isEnabledFor(logging.WARNING):
            self._write(logging.WARNING, event, values)

    def _write(self, level: int, event: str, values: dict[str, Any]) -> None:
        text = " ".join([event, *(f"{name}={value!r}" for name, value in values.items())])
        self._plain.log(level, "%s", text, stacklevel=3)  # the record names the caller's line
