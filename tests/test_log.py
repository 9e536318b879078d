"""A library that prints nothing: events go to the logging that the application configured, or nowhere."""

import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog
from structlog.testing import capture_logs

from ds41rt.log import Logger

QUIET_RUN = """
import logging, sys
if sys.argv[2] == "logging at WARNING":
    logging.basicConfig(level=logging.WARNING)
from ds41rt.engine import Engine
with Engine.open(sys.argv[1], mode="step-graph", expert_slots=30) as engine, engine.new_sequence() as seq:
    for token in range(100):
        engine.decode_step(seq, token)
    stats = engine.stats()
assert stats.tokens == 100 and stats.clean_replays and stats.falls["miss"], stats
"""

REFUSED_GRAPHS = """
import sys
from ds41rt.engine import Engine
Engine.open(sys.argv[1], mode="step-graph", device_route=False).close()  # warns
"""


@pytest.fixture
def unconfigured() -> None:
    structlog.reset_defaults()


def run(script: str, *argv: object) -> tuple[int, str, str]:
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", script, *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("logging_state", ["no logging configured", "logging at WARNING"])
def test_import_load_and_100_tokens_print_nothing(checkpoint: Callable[[str], Path], logging_state: str) -> None:
    assert run(QUIET_RUN, checkpoint("micro"), logging_state) == (0, "", "")


def test_even_a_warning_is_silent_until_logging_is_configured(checkpoint: Callable[[str], Path]) -> None:
    assert run(REFUSED_GRAPHS, checkpoint("micro")) == (0, "", "")
    configured = "import logging; logging.basicConfig()" + REFUSED_GRAPHS
    code, out, err = run(configured, checkpoint("micro"))
    assert (code, out) == (0, "")
    assert err.startswith("WARNING:ds41rt.engine:step graph not usable, the step runs eagerly reason=")
    assert len(err.splitlines()) == 1


@pytest.mark.usefixtures("unconfigured")
@pytest.mark.parametrize("level", ["debug", "info", "warning"])
def test_standard_logging_gets_events_with_values(caplog: pytest.LogCaptureFixture, level: str) -> None:
    with caplog.at_level(level.upper(), logger="ds41rt"):
        getattr(Logger("ds41rt.x"), level)("100 % sure", a=1, b="two")
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("ds41rt.x", level.upper())
    assert record.getMessage() == "100 % sure a=1 b='two'"
    assert record.pathname == __file__


@pytest.mark.usefixtures("unconfigured")
def test_nothing_is_formatted_below_the_level(caplog: pytest.LogCaptureFixture) -> None:
    class Loud:
        def __repr__(self) -> str:
            raise AssertionError("formatted although nobody listens")

    log = Logger("ds41rt.x")
    log.debug("event", value=Loud())
    log.info("event", value=Loud())
    with caplog.at_level(logging.ERROR, logger="ds41rt"):
        log.warning("event", value=Loud())
    assert caplog.records == []


@pytest.mark.usefixtures("unconfigured")
def test_structlog_gets_events_once_it_is_configured() -> None:
    """A logger made before the configuration follows it."""
    log = Logger("ds41rt.x")
    log.warning("lost")
    seen: list[Any] = []

    def keep(logger: Any, method: str, event: Any) -> Any:
        seen.append((method, dict(event)))
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    log.debug("a", n=1)
    log.info("b", n=2)
    log.warning("c", n=3)
    assert seen == [
        ("debug", {"event": "a", "n": 1}),
        ("info", {"event": "b", "n": 2}),
        ("warning", {"event": "c", "n": 3}),
    ]


@pytest.mark.usefixtures("unconfigured")
def test_capture_logs_sees_events() -> None:
    with capture_logs() as logs:
        Logger("ds41rt.x").info("segment captured", owner=0)
    assert logs == [{"event": "segment captured", "owner": 0, "log_level": "info"}]
