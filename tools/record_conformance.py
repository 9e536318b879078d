"""Record what a backend answers to the conformance cases: `python tools/record_conformance.py --out record-h200.json`.

On a real device this is the truth that the simulated one is compared with (tests/conformance). Every answer of a device
comes from a process of its own, so that a lost context, or a crash, costs one answer. An answer that is no outcome is
recorded as "raised", and the exit status is then 1. The file holds no date, address or time: two runs on the same
machine are to give equal bytes, but for the cases that are only observed.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from raw_questions import QUESTIONS, Raw

from ds41rt.cu.backend import open_backend
from ds41rt.cu.host import HostBackend
from ds41rt.cu.ptx import cuda_version
from ds41rt.testing import CountingBackend
from ds41rt.testing.conformance import CASES, Outcome, run_case
from ds41rt.testing.conformance.case import Rig

PROCESSES = 8
ANSWER_TIMEOUT_S = 60


def open_counting(name: str) -> CountingBackend:
    if name == "host":
        # Some cases race on purpose, to see when bytes are read: the codes are what is compared.
        return HostBackend(race_detection=False)
    backend, _ = open_backend(name)
    # The driver backend counts its live objects too; the protocol does not ask for it.
    return backend  # type: ignore[return-value]


def ask_raw(name: str) -> Outcome:
    """A question that only the driver's own calls can put."""
    from cuda.bindings import driver

    backend = open_counting("cuda")
    try:
        return QUESTIONS[name](Raw(driver, Rig(backend)))
    finally:
        backend.close()


def in_a_process(kind: str, name: str) -> Outcome:
    """The answer of the real device to one case or raw question."""
    command = [sys.executable, __file__, f"--{kind}", name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=ANSWER_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return {"raised": f"no answer within {ANSWER_TIMEOUT_S} s"}
    if done.returncode:
        return {"raised": f"exit status {done.returncode}: {(done.stderr.strip() or '?').splitlines()[-1]}"}
    outcome: Outcome = json.loads(done.stdout)
    return outcome


def about() -> dict[str, str]:
    """What answers: device, driver, CUDA, bindings."""
    from cuda.bindings import driver

    backend = open_counting("cuda")
    device = backend.device_name
    backend.close()
    code, number = driver.cuDriverGetVersion()
    module = Path("/proc/driver/nvidia/version")
    release = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", module.read_text()) if module.is_file() else None
    return {
        "device": device,
        "driver": release[0] if release else "unknown",
        "cuda": "unknown" if code else ".".join(map(str, cuda_version(int(number)))),
        "cuda-bindings": version("cuda-bindings"),
        "system": f"{platform.system()} {platform.machine()}",
    }


def record(backend_name: str) -> dict[str, Any]:
    """Everything: about the device, the cases, the raw questions."""
    if backend_name == "host":
        cases = {name: run_case(case, open_counting("host")) for name, case in CASES.items()}
        return {"about": {"device": HostBackend.device_name}, "cases": cases}
    with ThreadPoolExecutor(PROCESSES) as pool:
        asked = {
            kind: {name: pool.submit(in_a_process, kind, name) for name in names}
            for kind, names in (("case", CASES), ("raw", QUESTIONS))
        }
        answers = {kind: {name: future.result() for name, future in found.items()} for kind, found in asked.items()}
    return {"about": about(), "cases": answers["case"], "raw": answers["raw"]}


def main() -> int:
    parser = argparse.ArgumentParser(description="Record what a backend answers to the conformance cases.")
    parser.add_argument("--backend", choices=("cuda", "host"), default="cuda")
    parser.add_argument("--out", type=Path, help="the file to write")
    parser.add_argument("--case", choices=sorted(CASES), help="run this one here and print its outcome")
    parser.add_argument("--raw", choices=sorted(QUESTIONS), help="put this question to the driver and print its answer")
    args = parser.parse_args()
    if args.case is not None:
        print(json.dumps(run_case(CASES[args.case], open_counting(args.backend))))
        return 0
    if args.raw is not None:
        print(json.dumps(ask_raw(args.raw)))
        return 0
    if args.out is None:
        parser.error("--out FILE is missing")
    found = record(args.backend)
    args.out.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    answers = {f"{part} {name}": a for part in ("cases", "raw") for name, a in found.get(part, {}).items()}
    raised = {name: answer["raised"] for name, answer in answers.items() if "raised" in answer}
    for name, text in raised.items():
        print(f"{name}: {text}", file=sys.stderr)
    print(f"{args.out}: {len(answers)} answers of {found['about']['device']}, {len(raised)} of them raised")
    return 1 if raised else 0


if __name__ == "__main__":
    sys.exit(main())
