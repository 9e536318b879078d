"""Mutation testing of the protocol: breaks one thing at a time in a copy of the tree and says which tests noticed.

    python tools/mutate.py --list                          how many mutants there are, by file and kind
    python tools/mutate.py --results mutants.json          run all of them; run again to go on where it stopped
    python tools/mutate.py --results mutants.json --report what survived

Mutants are generated from the syntax trees of `TARGETS`: every comparison, every integer plus and minus one, every
early return, guard and statement call (waits, records and synchronisations are such) removed, every `not` removed,
`and` and `or` swapped, assignments to attributes removed; a function that has none of these is emptied. A mutant is
killed when a test fails, or does not end in time. Most die in a second of the scenarios in `SMOKE`, in a fork of this
process whose function was exchanged; for the others the `STAGES` are tried, those that know the file best first.
The documentation lists the survivors with a reason each.
"""

import argparse
import ast
import copy
import importlib
import json
import logging
import os
import random
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = Path("src/ds41rt")
TARGETS = ("step/*.py", "moe/*.py", "cu/host/stream.py", "cu/host/capture.py", "cu/host/graph.py")
MIN_LIMIT_S, LIMIT_FACTOR = 20.0, 5.0  # of one stage: this often what it takes without a mutation, but at least this
LIMIT_NBYTES = 6 << 30  # of address space: a loop that never ends may also never stop allocating

HOST = [["tests/cu/test_host_streams.py", "tests/cu/test_host_capture.py", "tests/cu/test_host_memory.py"]]
HOST += [["tests/cu/test_host_kernels.py", "tests/engine/test_engine_workspace.py"]]
QUICK = [
    "tests/protocol/test_scenarios.py",
    "-k",
    "disturbance or pair or lies or something_else or baked or read_fails",
]
PROTOCOL = ["tests/protocol"]
ENGINE = [
    ["tests/engine/test_engine_falls.py", "tests/engine/test_engine_routes.py", "tests/engine/test_engine_trace.py"],
    ["tests/engine/test_engine_waits.py"],
    ["tests/engine/test_engine_failures.py"],
    ["tests/engine/test_engine_sequences.py", "tests/engine/test_engine_growth.py"],
    ["tests/engine/test_engine_equal.py", "tests/engine/test_engine_mix.py"],
    ["tests/engine/test_engine_tiers.py", "tests/gpu"],
    ["tests/tools", "tests/test_log.py", "tests/cli"],
]
# By the beginning of the mutated file's name, the first that fits; a stage is one pytest command.
STAGES: dict[str, list[list[str]]] = {
    "step/machine": [["tests/step"], QUICK, PROTOCOL, *ENGINE],
    "step/": [QUICK, ["tests/step"], PROTOCOL, *ENGINE],
    "moe/route": [QUICK, ["tests/moe"], PROTOCOL, *ENGINE],
    "moe/fetch": [QUICK, ["tests/moe"], PROTOCOL, *ENGINE],
    "moe/": [["tests/moe"], QUICK, PROTOCOL, *ENGINE],
    "cu/host/": [*HOST, QUICK, ["tests/step"], PROTOCOL, *ENGINE],
}

COMPARISONS: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_PRINTING = threading.Lock()  # a change edits the tree that the mutants of a file share
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Mutant:
    """One change: where and what. `source` prints the whole file with it."""

    file: str  # below the package
    function: str
    kind: str
    what: str
    number: int  # among equals in its function
    tree: ast.Module
    change: Callable[[], Callable[[], None]]

    @property
    def name(self) -> str:
        return f"{self.file}:{self.function}: {self.kind}: {self.what}" + (f" #{self.number}" if self.number else "")

    def source(self) -> str:
        with _PRINTING:
            undo = self.change()
            source = ast.unparse(ast.fix_missing_locations(_DropNot().visit(copy.deepcopy(self.tree))))
            undo()
        return source


# ---- generating


class _Sites(ast.NodeVisitor):
    """Collects (function, kind, description, node, change) for each mutant of a module; a change edits the node."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, str, Callable[[], Callable[[], None]]]] = []
        self._scope: list[str] = []
        self._functions: list[Function] = []

    def add(self, kind: str, what: str, change: Callable[[], Callable[[], None]]) -> None:
        self.found.append((".".join(self._scope), kind, what, change))

    # Annotations, decorators, defaults and docstrings are left alone: tests of behaviour cannot see them.
    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._scope.append(node.name)
        for child in node.body:
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                self.visit(child)
        self._scope.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        body = [s for s in node.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
        if not body or any(isinstance(d, ast.Name) and d.id == "overload" for d in node.decorator_list):
            return  # an interface
        self._scope.append(node.name)
        self._functions.append(node)
        before = len(self.found)
        self.block(node.body, early=False)
        for child in body:
            self.visit(child)
        if len(self.found) == before and not _is_pass(body):
            self.add("body", "emptied", _setting(node, "body", [ast.Pass()]))
        self._functions.pop()
        self._scope.pop()

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if self._functions and node.value is not None:
            self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        if self._functions:
            for i, op in enumerate(node.ops):
                ops: list[ast.cmpop] = list(node.ops)
                ops[i] = COMPARISONS[type(op)]()
                self.add("comparison", ast.unparse(node), _setting(node, "ops", ops))
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if self._functions and type(node.value) is int:
            for delta in (1, -1):
                self.add("integer", f"{node.value} {delta:+d}", _setting(node, "value", node.value + delta))

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if self._functions and isinstance(node.op, ast.Not):
            self.add("not", ast.unparse(node), _setting(node, "op", None))
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        if self._functions:
            other = ast.Or() if isinstance(node.op, ast.And) else ast.And()
            self.add("and/or", ast.unparse(node), _setting(node, "op", other))
        self.generic_visit(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """The words of messages are left alone."""

    def visit_Raise(self, node: ast.Raise) -> None:
        """What an error says is left alone; `generic_visit` of the block above removes it."""

    def generic_visit(self, node: ast.AST) -> None:
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and self._functions:
                self.block(block, early=True)
        super().generic_visit(node)

    def visit(self, node: ast.AST) -> None:
        if not (isinstance(node, ast.Call) and ast.unparse(node.func).startswith(("logger.", "log."))):
            super().visit(node)

    def block(self, block: list[ast.stmt], early: bool) -> None:
        for i, s in enumerate(block):
            removed = _removing(block, i)
            text = ast.unparse(s).splitlines()[0][:90]
            if isinstance(s, ast.Return | ast.Continue | ast.Break | ast.Raise) and early:
                self.add("exit removed", text, removed)
            elif isinstance(s, ast.Expr) and isinstance(s.value, ast.Call):
                if not text.startswith(("logger.", "log.")):
                    self.add("call removed", text, removed)
            elif isinstance(s, ast.Assign | ast.AugAssign) and self._scope[-1] != "__init__":
                targets = s.targets if isinstance(s, ast.Assign) else [s.target]
                if any(isinstance(t, ast.Attribute | ast.Subscript | ast.Tuple) for t in targets):
                    self.add("assignment removed", text, removed)


def _is_pass(body: list[ast.stmt]) -> bool:
    return all(isinstance(s, ast.Pass) for s in body)


def _setting(node: ast.AST, field: str, value: object) -> Callable[[], Callable[[], None]]:
    """A change that can be undone: it returns what undoes it."""

    def change() -> Callable[[], None]:
        old = getattr(node, field)
        setattr(node, field, value)
        return lambda: setattr(node, field, old)

    return change


def _removing(block: list[ast.stmt], i: int) -> Callable[[], Callable[[], None]]:
    def change() -> Callable[[], None]:
        old = block[i]
        block[i] = ast.Pass()
        return lambda: block.__setitem__(i, old)

    return change


class _DropNot(ast.NodeTransformer):
    """A `not` whose operator was taken away is its operand."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        self.generic_visit(node)
        return node.operand if node.op is None else node


def mutants_of(file: str, text: str) -> Iterator[Mutant]:
    tree = ast.parse(text)
    sites = _Sites()
    sites.visit(tree)
    seen: Counter[tuple[str, str, str]] = Counter()
    for function, kind, what, change in sites.found:
        key = function, kind, what
        yield Mutant(file, function, kind, what, seen[key], tree, change)
        seen[key] += 1


def all_mutants() -> list[Mutant]:
    out: list[Mutant] = []
    for pattern in TARGETS:
        for path in sorted((ROOT / PACKAGE).glob(pattern)):
            out += mutants_of(str(path.relative_to(ROOT / PACKAGE)), path.read_text())
    return out


# ---- running

SMOKE = (
    {
        "words": "a*3 a/miss=0.0/falls=0 a/miss=1.1/falls=1 a/miss=2.2/falls=2 a/miss=3.0/falls=3 a/miss=all "
        "a/miss=/clean a/miss=/wrong=2.1/falls=2/stale_table=1 a/miss=1.0/wrong=1.0/falls=1/no_flag=1 a/miss=/lost=0.1 "
        "b a:fork=c c a/miss=/clean a*12",
        "slots": 16,
        "schedule": "random:1",
        "watch": True,
    },
    {
        "words": "a*3 a/bake=3/late=40 a a/miss=1.0/fail=30 b a a/miss=all/reads=3 a a/read=0 a a/move=1@1 a/move=2 a "
        "a/move=4 a a/move=6@1 a a:reset a*3 a:truncate=-1 a/other=1.end/captures=1 a/bake=1/captures=3 "
        "a/miss=/clean b:close a*2",
        "slots": 17,
    },
    {"words": "a*30", "slots": 5, "schedule": "eager"},
    {"words": "a*2/record=30 a reopen a*2 a/stop=20 a a/late=50 a*2", "slots": 20, "schedule": "random:2"},
    {"words": "a*6 a/wrong=1.0 a/miss=all/reads=2 a b", "slots": 16, "mode": "eager", "schedule": "random:3"},
)


class Smoke:
    """Runs the scenarios of `SMOKE` in forks; what the twin expects is computed once, before."""

    def __init__(self, folder: Path) -> None:
        sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "protocol")]
        scenario = importlib.import_module("scenario")
        synth = importlib.import_module("ds41rt.checkpoint.synth")
        path = folder / "checkpoint"
        synth.synthesize(path, scenario.PRESET, 1)
        self._runner = scenario.Runner(path, "host")
        self._scenarios = [scenario.Scenario(**fields) for fields in SMOKE]
        self._run()
        start = time.monotonic()
        self._run()
        self._limit_s = max(MIN_LIMIT_S, LIMIT_FACTOR * (time.monotonic() - start))
        print(f"baseline {time.monotonic() - start:5.1f} s  smoke", flush=True)

    def _run(self) -> None:
        for scenario in self._scenarios:
            self._runner(scenario)

    def __call__(self, mutant: Mutant) -> tuple[bool, str]:
        """(passed, what failed). One that does not end, or cannot be exchanged in place, passes: the stages decide."""
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            why = ""
            try:
                resource.setrlimit(resource.RLIMIT_AS, (LIMIT_NBYTES, LIMIT_NBYTES))
                logging.disable()
                if exchange(mutant):
                    self._run()
            except BaseException as error:  # noqa: BLE001  # whatever it is, the mutant was noticed
                why = f"smoke: {str(error).splitlines()[:1]} {error.__cause__!r}"[:300]
            os.write(write, why.encode())
            os._exit(0)
        os.close(write)
        ready, _, _ = select.select([read], [], [], self._limit_s)
        if not ready:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        with os.fdopen(read) as pipe:
            why = pipe.read() if ready else ""
        return not why, why


def exchange(mutant: Mutant) -> bool:
    """Give the function that is loaded the mutant's code, so that all who imported it have it; False if that fails."""
    name = "ds41rt." + mutant.file.removesuffix(".py").replace("/", ".")
    fresh = types.ModuleType(name)
    exec(compile(mutant.source(), mutant.file, "exec"), fresh.__dict__)
    old: Any = importlib.import_module(name)
    new: Any = fresh
    for part in mutant.function.split("."):
        if part not in vars(old):
            break  # a function in a function: it is in the code of the outer one
        old, new = vars(old)[part], vars(new)[part]
        old, new = (getattr(x, "fget", None) or getattr(x, "__func__", x) for x in (old, new))
    if not isinstance(old, types.FunctionType) or old.__code__.co_freevars != new.__code__.co_freevars:
        return False
    old.__code__ = new.__code__
    return True


def stages_of(mutant: Mutant) -> list[list[str]]:
    return next(stages for start, stages in STAGES.items() if mutant.file.startswith(start))


class Tree:
    """A copy of source and tests in a temporary folder; the goldens and the compiled kernels are linked."""

    def __init__(self, folder: Path, smoke: Smoke, limits_s: dict[str, float]) -> None:
        self.folder = folder
        self._smoke = smoke
        self._limits_s = limits_s  # by stage, shared by all trees
        skip = shutil.ignore_patterns("__pycache__", "goldens", "goldens_own", ".hypothesis")
        for name in ("src", "tests"):
            shutil.copytree(ROOT / name, folder / name, ignore=skip)
        for name in ("tests/goldens", "tests/goldens_own", "ptx", "tools", "README.md", "CHANGELOG.md"):
            if (ROOT / name).exists():
                (folder / name).symlink_to(ROOT / name)
        shutil.copy(ROOT / "pyproject.toml", folder)

    def pytest(self, args: list[str]) -> tuple[bool, str]:
        """(passed, the first line about a failure)."""
        env = {k: v for k, v in os.environ.items() if not k.startswith(("DS41RT_", "PYTEST_"))}
        paths = [str(self.folder / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        env |= {"PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1"}
        limit_s = self._limits_s.get(" ".join(args), 600.0)
        start = (
            f"import resource, sys, pytest; resource.setrlimit(resource.RLIMIT_AS, ({LIMIT_NBYTES}, {LIMIT_NBYTES})); "
        )
        command = [sys.executable, "-c", start + "sys.exit(pytest.main(sys.argv[1:]))"]
        process = subprocess.Popen(
            [*command, "-x", "--tb=line", "-p", "no:cacheprovider", *args],
            cwd=self.folder,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            return False, f"no end after {limit_s:.0f} s: {' '.join(args)}"
        if process.returncode == 0:
            return True, ""
        lines = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR", "E  "))]
        return False, (lines or output.strip().splitlines() or [f"exit code {process.returncode}"])[-1][:300]

    def run(self, mutant: Mutant, n_stages: int | None) -> dict[str, object]:
        path = self.folder / PACKAGE / mutant.file
        original = path.read_text()
        start = time.monotonic()
        try:
            path.write_text(mutant.source())
            for stage in [None, *stages_of(mutant)][:n_stages]:
                passed, why = self._smoke(mutant) if stage is None else self.pytest(stage)
                if not passed:
                    return {"killed": True, "by": why, "seconds": round(time.monotonic() - start, 1)}
        finally:
            path.write_text(original)
        return {"killed": False, "by": "", "seconds": round(time.monotonic() - start, 1)}

    def check_baseline(self, stages: list[list[str]]) -> None:
        """Without a mutation, but printed from the syntax tree as mutants are, everything passes."""
        for pattern in TARGETS:
            for path in sorted((ROOT / PACKAGE).glob(pattern)):
                (self.folder / path.relative_to(ROOT)).write_text(ast.unparse(ast.parse(path.read_text())))
        for stage in stages:
            start = time.monotonic()
            passed, why = self.pytest(stage)
            self._limits_s[" ".join(stage)] = max(MIN_LIMIT_S, LIMIT_FACTOR * (time.monotonic() - start))
            print(f"baseline {time.monotonic() - start:5.1f} s  {' '.join(stage)[:100]}", flush=True)
            if not passed:
                raise SystemExit(f"the tests fail without a mutation: {why}")


def run_all(
    todo: list[Mutant],
    results: dict[str, dict[str, object]],
    file: Path,
    *,
    jobs: int,
    n_stages: int | None,
    seconds: float,
) -> None:
    with tempfile.TemporaryDirectory(prefix="ds41rt-mutants-") as folder:
        trees: SimpleQueue[Tree] = SimpleQueue()
        limits_s: dict[str, float] = {}
        smoke = Smoke(Path(folder))
        for i in range(jobs):
            trees.put(Tree(Path(folder) / str(i), smoke, limits_s))
        first = trees.get()
        stages = [stage for mutant in todo for stage in stages_of(mutant)[: None if n_stages is None else n_stages - 1]]
        first.check_baseline([s for i, s in enumerate(stages) if s not in stages[:i]])
        trees.put(first)
        end = time.monotonic() + seconds

        def one(mutant: Mutant) -> None:
            if time.monotonic() > end:
                return
            tree = trees.get()
            try:
                result = tree.run(mutant, n_stages)
            finally:
                trees.put(tree)
            results[mutant.name] = result
            part = file.with_suffix(".part")
            part.write_text(json.dumps(dict(results), indent=1, sort_keys=True))
            part.replace(file)
            if not result["killed"]:
                print(f"survived: {mutant.name}", flush=True)

        with ThreadPoolExecutor(jobs) as pool:
            list(pool.map(one, todo))


def report(mutants: list[Mutant], results: dict[str, dict[str, object]]) -> int:
    """Counts, and the survivors; returns how many there are."""
    ran = [m for m in mutants if m.name in results]
    survivors = [m for m in ran if not results[m.name]["killed"]]
    functions = {(m.file, m.function) for m in mutants}
    hit = {(m.file, m.function) for m in ran}
    for m in survivors:
        print(f"survived: {m.name}")
    print(
        f"{len(mutants)} mutants of {len(functions)} functions; run: {len(ran)} of {len(hit)} functions; "
        f"killed: {len(ran) - len(survivors)}; survived: {len(survivors)}"
    )
    return len(survivors)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--results", type=Path, default=Path("mutants.json"), help="JSON file to write and to go on from"
    )
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--shard", default="1/1", help="i/n: every n-th mutant of the shuffled list")
    parser.add_argument("--only", default="", help="mutants whose name contains this")
    parser.add_argument("--retry", action="store_true", help="run survivors again")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no mutant after this long")
    parser.add_argument(
        "--stages", type=int, help="only this many stages, smoke is the first; run again with --retry for the rest"
    )
    parser.add_argument("--list", action="store_true", help="count the mutants and stop")
    parser.add_argument("--report", action="store_true", help="say what survived and stop")
    args = parser.parse_args()
    mutants = [m for m in all_mutants() if args.only in m.name]
    if args.list:
        for what in (Counter(m.file for m in mutants), Counter(m.kind for m in mutants)):
            for key, n in sorted(what.items()):
                print(f"{n:5d}  {key}")
        return 0
    results = json.loads(args.results.read_text()) if args.results.exists() else {}
    if not args.report:
        # a fixed order in which functions take turns: a part of the run is a sample of all
        random.Random(0).shuffle(mutants)
        turn: Counter[tuple[str, str]] = Counter()
        order: list[tuple[int, int]] = []
        for i, m in enumerate(mutants):
            order.append((turn[m.file, m.function], i))
            turn[m.file, m.function] += 1
        index, count = map(int, args.shard.split("/"))
        queue = [mutants[i] for _, i in sorted(order)][index - 1 :: count]
        todo = [m for m in queue if m.name not in results or (args.retry and not results[m.name]["killed"])]
        run_all(todo, results, args.results, jobs=args.jobs, n_stages=args.stages, seconds=args.seconds)
    return 1 if report(mutants, results) else 0


if __name__ == "__main__":
    sys.exit(main())
