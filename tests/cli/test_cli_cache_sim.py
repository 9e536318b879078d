"""`ds41rt cache-sim` and the trace that `ds41rt decode --route-trace-out` hands to it."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from cli_harness import assert_refused, run_cli

from ds41rt.checkpoint.layout import ExpertLayout
from ds41rt.checkpoint.synth_presets import PRESETS, RELEASED
from ds41rt.engine import Engine
from ds41rt.moe.route_trace import RouteTrace, load_route_trace
from ds41rt.tools.cache_plot import Panel
from ds41rt.tools.cache_sim import FORMULA, route_facts
from ds41rt.tools.decode import engine_facts
from ds41rt.tools.route_synth import PATTERNS, synthetic_routes

Capsys = pytest.CaptureFixture[str]
IDS = "5,17,42,99,7,3"


@pytest.fixture(scope="module")
def micro(checkpoint: Callable[[str], Path]) -> Path:
    return checkpoint("micro")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """120 tokens of made-up routes at the tiny geometry: 8 layers x 384 experts, top 6."""
    facts = route_facts(PRESETS["tiny"])
    ids = synthetic_routes(PATTERNS["drift"], 120, n_layers=8, n_experts=384, top_k=6, seed=2)
    path = tmp_path_factory.mktemp("routes") / "tiny.npz"
    with path.open("wb") as file:
        RouteTrace(facts, ids).save(file)
    return path


def simulated(capsys: Capsys, *argv: object) -> dict[str, Any]:
    result = run_cli(capsys, "cache-sim", *argv, "--json")
    assert (result.code, result.err) == (0, "")
    assert result.out.count("\n") == 1
    found: dict[str, Any] = json.loads(result.out)
    return found


def test_the_facts_of_the_released_model() -> None:
    facts = route_facts(RELEASED)
    assert (facts.n_layers, facts.n_experts, facts.top_k) == (40, 384, 6)
    assert facts.segment_starts == (0, 2, 8, 14, 20, 24, 28, 32, 36)
    assert facts.expert_nbytes == facts.slot_nbytes == ExpertLayout.of(RELEASED).nbytes == 18_800_640


@pytest.mark.parametrize("mode", ["eager", "step-graph"])
def test_decode_records_the_picks_of_every_token(micro: Path, tmp_path: Path, capsys: Capsys, mode: str) -> None:
    routes, whole = tmp_path / "routes.npz", tmp_path / "trace.npz"
    result = run_cli(
        capsys, "decode", micro, "--prompt-ids", IDS, "--max-new", 6, "--ignore-eos", "--expert-slots", 8,
        "--route-trace-out", routes, "--trace-out", whole, "--mode", mode, "--json",
    )  # fmt: skip
    assert result.code == 0, result.err
    read = load_route_trace(routes)
    with np.load(whole) as data:
        assert np.array_equal(read.expert_ids, data["expert_ids"])
    assert read.n_tokens == json.loads(result.out)["positions"] == 11
    assert read.facts == route_facts(PRESETS["micro"])
    with Engine.open(micro, step_graph=mode == "step-graph") as engine:
        assert engine_facts(engine) == read.facts


@pytest.mark.parametrize("policy", ["oldest", "least-used"])
def test_the_simulation_has_the_hits_of_the_run_that_was_recorded(
    micro: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    """One tier, the same policy and seed: what the engine counted, exactly."""
    monkeypatch.setenv("DS41RT_EVICT_POLICY", policy)
    monkeypatch.setenv("DS41RT_EVICT_RANDOM_PCT", "40")
    routes = tmp_path / "routes.npz"
    result = run_cli(
        capsys, "decode", micro, "--prompt-ids", IDS, "--max-new", 30, "--ignore-eos", "--expert-slots", 24,
        "--route-trace-out", routes, "--json",
    )  # fmt: skip
    run = json.loads(result.out)
    with Engine.open(micro) as engine:
        assert engine.settings.evict_policy == policy
    found = simulated(
        capsys, "--trace", routes, "--device-slots", 24, "--policies", policy, "--evict-random-pct", 40,
        "--warm-tokens", 0,
    )  # fmt: skip
    (row,) = found["rows"]
    assert row["misses_per_token"] == run["misses"] / run["positions"]
    assert row["device_hit_rate"] == run["device_hits"] / (run["positions"] * 4 * 3)
    assert 0.2 < row["device_hit_rate"] < 0.9


def test_json_rows_and_formula(trace: Path, capsys: Capsys) -> None:
    found = simulated(
        capsys, "--trace", trace, "--device-slots", "600,300", "--host-slots", "0,500", "--moves", 3,
        "--promote-after", 2, "--first-used-first", "--pcie-gb-s", 50, "--disk-gb-s", 4, "--compute-ms", 1.5,
    )  # fmt: skip
    ids = load_route_trace(trace).expert_ids
    seen = [{(i, e) for i, layer in enumerate(token) for e in layer} for token in ids.tolist()]
    first = sum(len(seen[t].difference(*seen[:t])) for t in range(40, 120)) / 80
    assert first > 0
    assert found["trace"].pop("first_uses_per_token") == first
    assert found["trace"] == {
        "name": str(trace), "tokens": 120, "warm_tokens": 40, "n_layers": 8, "n_experts": 384, "top_k": 6,
        "expert_nbytes": route_facts(PRESETS["tiny"]).expert_nbytes,
        "slot_nbytes": route_facts(PRESETS["tiny"]).slot_nbytes, "segment_starts": [0, 2, 5, 7],
    }  # fmt: skip
    assumed = found["assumed"]
    assert (assumed["moves"], assumed["promote_after"], assumed["most_used_first"]) == (3, 2, False)
    assert (assumed["pcie_gb_s"], assumed["disk_gb_s"], assumed["compute_ms"]) == (50, 4, 1.5)
    rows = found["rows"]
    assert [(r["device_slots"], r["host_slots"], r["policy"]) for r in rows] == [
        (d, h, p) for d in (300, 600) for h in (0, 500) for p in ("lru", "oldest", "least-used")
    ]
    nbytes = found["trace"]["expert_nbytes"]
    for row in rows:
        assert row["device_hit_rate"] + row["host_hit_rate"] + row["file_rate"] == pytest.approx(1)
        assert row["misses_per_token"] == pytest.approx(48 * row["file_rate"])
        over_pcie = 48 * (row["host_hit_rate"] + row["file_rate"])
        assert row["pcie_ms"] == pytest.approx(over_pcie * nbytes / 50e9 * 1e3)
        assert row["disk_ms"] == pytest.approx(row["misses_per_token"] * nbytes / 4e9 * 1e3)
        assert row["ms_per_token"] == pytest.approx(1.5 + row["pcie_ms"] + row["disk_ms"])
        assert row["moves_pcie_ms"] == pytest.approx(row["moves_per_token"] * nbytes / 50e9 * 1e3)
        assert row["moves_per_token"] <= 3
        assert row["misses_per_token"] >= first
        assert (row["moves_per_token"] > 0) == (row["host_hit_rate"] > 0) == (row["host_slots"] > 0)
        assert row["clean_rate"] == pytest.approx(sum(row["clean_by_segment"]) / 4)
    assert rows[-1]["file_rate"] < rows[0]["file_rate"]


def test_lru_is_oldest_without_chance(trace: Path, capsys: Capsys) -> None:
    base = ("--trace", trace, "--device-slots", 300)
    lru, oldest = simulated(capsys, *base, "--policies", "lru,oldest", "--evict-random-pct", 40)["rows"]
    (strict,) = simulated(capsys, *base, "--policies", "oldest", "--evict-random-pct", 0)["rows"]
    assert {**strict, "policy": "lru"} == lru
    assert lru["file_rate"] != oldest["file_rate"]


def test_budgets_in_gib_are_cut_as_the_engine_cuts_them(trace: Path, capsys: Capsys) -> None:
    size = route_facts(PRESETS["tiny"]).slot_nbytes
    gib = [(n * size + 5) / 2**30 for n in (101, 100)]
    found = simulated(
        capsys, "--trace", trace, "--device-gib", gib[0], "--host-gib", f"{gib[1]}", "--policies", "lru", "--json"
    )
    (row,) = found["rows"]
    assert (row["device_slots"], row["host_slots"]) == (100, 100)  # slot 0 of the device is reserved
    found = simulated(
        capsys, "--trace", trace, "--device-slots", "3000,9999", "--host-slots", "9999", "--policies", "lru"
    )
    assert [(r["device_slots"], r["host_slots"]) for r in found["rows"]] == [(3000, 72), (3072, 0)]


def test_table_and_picture(trace: Path, tmp_path: Path, capsys: Capsys) -> None:
    svg = tmp_path / "plot.svg"
    result = run_cli(capsys, "cache-sim", "--trace", trace, "--device-slots", "300,600", "--svg", svg)
    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert "120 tokens, the first 40 not counted; 8 layers x 384 experts" in lines[0]
    assert lines[1].split() == [
        "device", "GiB", "host", "GiB", "policy", "on", "device", "in", "host", "file", "misses", "moves", "clean",
        "ms/token",
    ]  # fmt: skip
    assert [line.split()[:5] for line in lines[2:8]] == [
        [d, "<0.01", "0", "0.00", p] for d in ("300", "600") for p in ("lru", "oldest", "least-used")
    ]
    assert len({len(line) for line in lines[1:8]}) == 1
    heads = next(line for line in lines if line.startswith("device") and "0-1" in line)
    assert heads.split()[3:] == ["0-1", "2-4", "5-6", "7-7"]
    assert FORMULA in result.out
    assert "a token are the first use of an expert" in lines[-2]
    assert "compute 8.8 ms (the released model's on an H200; give this model's with --compute-ms), PCIe" in lines[-1]
    given = run_cli(capsys, "cache-sim", "--trace", trace, "--device-slots", "300", "--compute-ms", 8.8).out
    assert "compute 8.8 ms, PCIe 54 GB/s, disk 2 GB/s" in given
    texts = [t.text for t in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")]
    for text in ("lru", "oldest", "least-used", "hit rate in %", "ms a token", "device slots (experts)", "600"):
        assert text in texts
    assert [p.name for p in tmp_path.iterdir()] == ["plot.svg"]


def test_the_released_model_has_gib_and_its_own_time(capsys: Capsys) -> None:
    argv = ("--tokens", 9, "--device-gib", 60, "--host-slots", 1000, "--policies", "lru")
    out = run_cli(capsys, "cache-sim", "--synthetic", *argv).out
    assert out.splitlines()[2].split()[:5] == ["3,425", "59.99", "1,000", "17.51", "lru"]  # one device slot is reserved
    assert "compute 8.8 ms, PCIe 54 GB/s, disk 2 GB/s" in out


def test_with_room_for_all_every_miss_is_a_first_use(trace: Path, capsys: Capsys) -> None:
    for warm in (0, 70):
        found = simulated(capsys, "--trace", trace, "--device-slots", 3072, "--warm-tokens", warm)
        assert {row["misses_per_token"] for row in found["rows"]} == {found["trace"]["first_uses_per_token"]}


def test_the_picture_is_over_the_slots_that_differ(trace: Path, tmp_path: Path, capsys: Capsys) -> None:
    def texts(*argv: object) -> set[str | None]:
        svg = tmp_path / "plot.svg"
        assert run_cli(capsys, "cache-sim", "--trace", trace, *argv, "--policies", "lru", "--svg", svg).code == 0
        return {t.text for t in ElementTree.parse(svg).iter("{http://www.w3.org/2000/svg}text")}

    over_host = texts("--device-slots", 300, "--host-slots", "100,200")
    assert {"host slots (experts)", "lru, 300 device slots"} <= over_host
    both = texts("--device-slots", "300,400", "--host-slots", "100,200")
    assert {"device slots (experts)", "lru, 100 host slots", "lru, 200 host slots"} <= both
    assert "lru" in texts("--device-slots", 300)


def test_the_picture_shows_the_rows(
    trace: Path, tmp_path: Path, capsys: Capsys, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[Panel] = []

    def note(title: str, panels: list[Panel]) -> str:
        assert title == f"3,072 experts, {trace}"
        shown.extend(panels)
        return "<svg/>"

    monkeypatch.setattr("ds41rt.tools.cache_sim.line_charts", note)
    found = simulated(
        capsys, "--trace", trace, "--device-slots", "300,600", "--host-slots", 200, "--policies", "lru,least-used",
        "--svg", tmp_path / "plot.svg",
    )  # fmt: skip
    for policy in ("lru", "least-used"):
        rows = [r for r in found["rows"] if r["policy"] == policy]
        hits, times = (panel.series[f"{policy}, 200 host slots"] for panel in shown)
        assert [x for x, _ in hits] == [300, 600]
        assert [y for _, y in hits] == pytest.approx([100 * (1 - r["file_rate"]) for r in rows])
        assert times == [(r["device_slots"], r["ms_per_token"]) for r in rows]


def test_synthetic_routes_follow_the_seed(capsys: Capsys) -> None:
    def rows(*argv: object) -> Any:
        base = ("--tokens", 30, "--device-slots", 4000, "--policies", "lru")
        found = simulated(capsys, "--synthetic", *argv, *base)
        assert found["trace"]["tokens"] == 30
        return found["rows"]

    assert rows() == rows("drift", "--seed", 0)
    assert rows() != rows("--seed", 1)
    assert rows() != rows("steady")


def test_small_experts_have_a_size(trace: Path, capsys: Capsys) -> None:
    result = run_cli(capsys, "cache-sim", "--trace", trace, "--device-slots", 99)
    assert re.search(r"experts of [1-9][\d.]* kB, top", result.out.splitlines()[0])


def test_help_says_how_time_is_counted(capsys: Capsys) -> None:
    text = " ".join(run_cli(capsys, "cache-sim", "--help").out.split())
    assert FORMULA in text
    assert "H200" in text
    assert "assumed" in text


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--device-slots", "3,x"], ["--device-slots", "'x'"]),
        (["--device-slots", "3000.5"], ["--device-slots", "'3000.5'"]),
        (["--device-slots", "-3"], ["--device-slots", "'-3'"]),
        (["--device-slots", ""], ["--device-slots", "''"]),
        (["--device-gib", "nan"], ["--device-gib", "'nan'"]),
        (["--device-gib", "abc"], ["--device-gib 'abc'", "give GiB from 0, for example 60,90.5"]),
        (["--device-slots", "9,abc"], ["--device-slots '9,abc': 'abc'", "whole numbers from 0, for example 3000,5000"]),
        (["--device-slots", "99", "--host-gib", "1e99"], ["--host-gib", "'1e99'"]),
        (["--device-slots", "5"], ["5 device and 0 host slots", "6"]),
        (["--device-slots", "99", "--policies", "lru,best"], ["--policies", "'best'", "least-used"]),
        (["--device-slots", "99", "--evict-random-pct", "101"], ["evict_random_pct", "101"]),
        (["--device-slots", "99", "--moves", "-1"], ["--moves must be at least 0, is -1"]),
        (["--device-slots", "99", "--warm-tokens", "-1"], ["--warm-tokens must be at least 0, is -1"]),
        (["--device-slots", "99", "--warm-tokens", "120"], ["120 warm-up tokens of 120"]),
        (["--device-slots", "99", "--pcie-gb-s", "0"], ["--pcie-gb-s", "0"]),
        (["--device-slots", "99", "--disk-gb-s", "nan"], ["--disk-gb-s", "nan"]),
        (["--device-slots", "99", "--compute-ms", "-1"], ["--compute-ms", "-1"]),
        (["--device-slots", "99", "--tokens", "5"], ["--tokens", "--synthetic"]),
        (["--device-slots", "99", "--seed", "5"], ["--seed", "--synthetic"]),
        (["--device-slots", "99", "--svg", "/no/such/place/f.svg"], ["/no/such/place"]),
    ],
)
def test_bad_input_is_refused(trace: Path, capsys: Capsys, argv: list[str], words: list[str]) -> None:
    assert_refused(run_cli(capsys, "cache-sim", "--trace", trace, *argv), 2, *words)


def test_bad_traces_and_seeds_are_refused(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    none = tmp_path / "none.npz"
    assert_refused(run_cli(capsys, "cache-sim", "--trace", none, "--device-slots", 99), 2, str(none), "missing")
    other = micro / "config.json"
    assert_refused(run_cli(capsys, "cache-sim", "--trace", other, "--device-slots", 99), 2, str(other), "route trace")
    for argv in (("--tokens", 0), ("--tokens", -4), ("--seed", -1)):
        result = run_cli(capsys, "cache-sim", "--synthetic", *argv, "--device-slots", 99)
        assert_refused(result, 2, f"{argv[0]} {argv[1]}: give")


def test_two_outputs_of_decode_in_one_file_are_refused(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    same = tmp_path / "same.npz"
    for other in ("--trace-out", "--logits-out"):
        result = run_cli(
            capsys, "decode", micro, "--prompt-ids", IDS, other, same, "--route-trace-out", tmp_path / "." / "same.npz"
        )
        assert_refused(result, 2, other, "--route-trace-out", "same file")
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_fails_leaves_no_route_trace(micro: Path, tmp_path: Path, capsys: Capsys) -> None:
    routes = tmp_path / "routes.npz"
    result = run_cli(capsys, "decode", micro, "--prompt-ids", "1,288", "--route-trace-out", routes)
    assert result.code == 2
    assert list(tmp_path.iterdir()) == []
