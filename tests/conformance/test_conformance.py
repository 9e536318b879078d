"""The host backend against the committed answers of real drivers, case by case."""

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ds41rt.cu.host import HostBackend
from ds41rt.testing.conformance import CASES, Outcome, run_case

HERE = Path(__file__).parent
TOOL = HERE.parents[1] / "tools" / "record_conformance.py"
RECORDS = sorted({HERE / "record-h200.json", *HERE.glob("record-*.json")})
OTHER_SCHEDULES = ["eager", *(f"random:{seed}" for seed in range(4))]
# What the driver backend answers before the driver is asked: (question, key) is to agree with (case, key).
SAME = [
    (("zero_byte_allocation", "device"), ("allocate_nothing", "device")),
    (("begin_while_capturing", "second"), ("begin_while_capturing", "begin on main")),
    (("begin_while_capturing", "status"), ("begin_while_capturing", "main")),
    (("end_while_not_capturing", "end"), ("end_while_not_capturing", "end")),
]
# What both backends refuse and a driver would not: an empty buffer is always a mistake.
STRICTER = [(("zero_byte_allocation", "pinned"), ("allocate_nothing", "pinned"))]


@cache
def recorded(path: Path) -> dict[str, Any]:
    """A record. Without the file this fails: an answer that nobody gave cannot be agreed with."""
    if not path.is_file():
        pytest.fail(f"{path.name} is missing: run `python tools/record_conformance.py --out {path}` on the device")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@cache
def host_answer(name: str, schedule: str = "lazy") -> Outcome:
    # Some cases race on purpose, to see when bytes are read.
    return run_case(CASES[name], HostBackend(schedule, race_detection=False))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_record_answers_every_case(path: Path) -> None:
    found = recorded(path)
    assert sorted(found["cases"]) == sorted(CASES)
    assert {"device", "driver", "cuda", "cuda-bindings"} <= set(found["about"])
    assert found["about"]["device"] != HostBackend.device_name
    raised = {n: a["raised"] for part in ("cases", "raw") for n, a in found[part].items() if "raised" in a}
    assert raised == {}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_the_model_agrees_with_the_record(path: Path, name: str) -> None:
    """Or differs, where the case says why: then the difference still has to be there."""
    case, device, model = CASES[name], recorded(path)["cases"][name], host_answer(name)
    assert sorted(device) == sorted(model)
    if case.observed:
        return
    if case.differs:
        assert device != model, f"no longer different: {case.differs}"
        return
    assert {key: (device[key], model[key]) for key in model if device[key] != model[key]} == {}, case.rule


@pytest.mark.parametrize(("question", "case"), SAME, ids=lambda pair: " ".join(pair))
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_codes_that_the_driver_backend_gives_itself(
    path: Path, question: tuple[str, str], case: tuple[str, str]
) -> None:
    assert recorded(path)["raw"][question[0]][question[1]] == host_answer(case[0])[case[1]]


@pytest.mark.parametrize(("question", "case"), STRICTER, ids=lambda pair: " ".join(pair))
@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_what_both_backends_refuse_and_a_driver_does_not(
    path: Path, question: tuple[str, str], case: tuple[str, str]
) -> None:
    assert recorded(path)["raw"][question[0]][question[1]] == "SUCCESS"
    answers = recorded(path)["cases"][case[0]][case[1]], host_answer(case[0])[case[1]]
    assert answers == ("INVALID_VALUE", "INVALID_VALUE")


@pytest.mark.parametrize("schedule", OTHER_SCHEDULES)
def test_the_answers_do_not_depend_on_the_schedule(schedule: str) -> None:
    names = [name for name, case in CASES.items() if not (case.pending or case.observed)]
    assert len(names) > 50
    assert [name for name in names if host_answer(name, schedule) != host_answer(name)] == []


def test_cases_say_what_they_are_about() -> None:
    for name, case in CASES.items():
        assert case.rule.endswith("."), name
        assert host_answer(name), name
        assert not (case.observed and case.differs), name


def test_the_tool_records_the_same_bytes_twice(tmp_path: Path) -> None:
    files = [tmp_path / "one.json", tmp_path / "two.json"]
    for file in files:
        command = [sys.executable, str(TOOL), "--backend", "host", "--out", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
    assert files[0].read_bytes() == files[1].read_bytes()
    found = json.loads(files[0].read_text(encoding="utf-8"))
    assert found["cases"] == {name: host_answer(name) for name in CASES}


def test_the_tool_runs_one_case_alone() -> None:
    command = [sys.executable, str(TOOL), "--backend", "host", "--case", "wild_kernel"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout) == host_answer("wild_kernel")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if not (case.loses_context or case.observed)])
def test_this_driver_answers_as_recorded(name: str) -> None:
    from ds41rt.cu.driver import DriverBackend

    assert run_case(CASES[name], DriverBackend()) == recorded(RECORDS[0])["cases"][name]
