"""Device route and host chain: equal bits, the check of one by the other, refusals, and what needs which."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_harness import SCHEDULES, Call, Checkpoints, ProbeBackend, Run, check_counters, reference
from structlog.testing import capture_logs

from ds41rt.checkpoint.synth import synthesize
from ds41rt.checkpoint.synth_presets import PRESETS
from ds41rt.config import ModelConfig
from ds41rt.engine import Engine
from ds41rt.errors import ConfigError, NotFiniteError
from ds41rt.moe.header import HeaderError
from ds41rt.moe.route import RouteMismatchError


def warnings(logs: list[Any]) -> list[Any]:
    return [entry for entry in logs if entry["log_level"] == "warning"]


# ---- the two routes


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("slots", [3, 20, 64])
def test_host_route_gives_the_bits_of_the_device_route(checkpoint: Checkpoints, slots: int, schedule: str) -> None:
    """The reference was made by the device route."""
    with Run(reference(checkpoint("micro")), mode="eager", device_route=False, slots=slots, schedule=schedule) as run:
        run.steps(60)
        check_counters(run, undisturbed=False)


def test_host_route_of_a_larger_model(golden: Path) -> None:
    with Run(reference(golden / "checkpoint", 200), mode="eager", device_route=False, slots=900) as run:
        run.steps(30)


def test_a_thousand_tokens_of_both_routes_agree(checkpoint: Checkpoints) -> None:
    """Diagnostic mode: the host chain runs on the same logits, layer by layer, and finds no difference."""
    ref = reference(checkpoint("micro"))
    with Run(ref, mode="eager", slots=24, device_route_diag=True) as run, capture_logs() as logs:
        for _ in range(5):
            run.steps(200)
            run.seq.reset()
        n_layers = run.engine.config.n_layers
        assert run.stats().tokens == 1000
        assert run.engine.router.diag_checked == 1000 * n_layers
        assert [(e["layer_tokens"], e["mismatches"]) for e in logs if e["event"] == "device route checked"] == [
            (4000, 0)
        ]


def test_a_step_graph_run_checks_the_layers_that_run_again(checkpoint: Checkpoints) -> None:
    with Run(reference(checkpoint("micro")), slots=20, device_route_diag=True) as run:
        run.steps(40)
        eager_tokens = 2
        falls = sum(check_counters(run).falls.values())
        assert run.engine.router.diag_checked >= eager_tokens * run.engine.config.n_layers + falls


def spoil_bias(run: Run) -> None:
    bias = run.engine.router._biases[2]
    bias.flags.writeable = True
    bias[run.picks()[2][0]] -= 1e3


def spoil_scale(run: Run) -> None:
    cfg = run.engine.router._cfg
    object.__setattr__(cfg, "route_scale", float(np.nextafter(np.float32(cfg.route_scale), np.float32(9))))


def spoil_plan(run: Run) -> None:
    """The plan block changes between selection and check."""
    plan = run.engine.router._buffers.plan

    def hook(name: str, args: tuple[Any, ...], call: Call) -> Any:
        if "diag.plan" in args:
            run.backend.synchronize(run.engine.stream)
            run.backend.memory.bytes(plan, 1)[:] ^= 1
        return call()

    run.probe.hook = hook


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (spoil_bias, "layer 2: device picks"),
        (spoil_scale, "layer 0: device weights"),
        (spoil_plan, "layer 0: the plan block"),
    ],
)
def test_a_difference_between_the_routes_fails_the_step(
    checkpoint: Checkpoints, spoil: Callable[[Run], None], says: str
) -> None:
    with Run(reference(checkpoint("micro")), mode="eager", device_route_diag=True) as run:
        run.steps(3)
        spoil(run)
        with pytest.raises(RouteMismatchError, match=says):
            run.step()
        assert run.seq.position == 3


# ---- asked for, and not usable


def test_step_graph_without_the_device_route_warns_once_and_runs_eagerly(checkpoint: Checkpoints) -> None:
    """Graphs requested but not used: one warning with the reason, and the counters say 0 replays."""
    with capture_logs() as logs, Run(reference(checkpoint("micro")), device_route=False, slots=20) as run:
        run.steps(10)
        (warning,) = warnings(logs)
        assert warning["event"] == "step graph not usable, the step runs eagerly"
        assert warning["reason"] == "the device route is off"
        stats = check_counters(run, undisturbed=False)
        assert (stats.replays, stats.captures) == (0, 0)


def other_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Path:
    """A synthetic checkpoint of the micro preset with some values changed."""
    values = PRESETS["micro"].model_dump()
    monkeypatch.setitem(PRESETS, "micro", ModelConfig(**{**values, **changes}))
    synthesize(tmp_path / "other", "micro", 3)
    return tmp_path / "other"


@pytest.mark.parametrize("changes", [{"top_k": 9}, {"n_experts": 1030}], ids=str)
def test_what_the_selection_kernel_cannot_take_is_routed_on_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    with capture_logs() as logs, Engine.open(other_model(tmp_path, monkeypatch, **changes), backend="host") as engine:
        (warning,) = warnings(logs)
        assert warning["event"] == "device route not usable, routing on the host"
        assert {key: warning[key] for key in changes} == changes
        assert not engine.device_route
        seq = engine.new_sequence()
        assert np.isfinite(engine.prefill(seq, [3, 5, 200])).all()


@pytest.mark.parametrize("changes", [{"top_k": 8}, {"n_experts": 1024, "top_k": 1}], ids=str)
def test_the_largest_selection_that_the_kernel_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, int]
) -> None:
    """Both routes and the step graph agree at the limits; with one pick there is nothing to normalise."""
    ref = reference(other_model(tmp_path, monkeypatch, **changes), 12)
    for settings in ({"mode": "eager", "device_route": False}, {"mode": "eager", "device_route_diag": True}, {}):
        with capture_logs() as logs, Run(ref, slots=40, **settings) as run:  # type: ignore[arg-type] # a few settings
            run.steps(12)
            assert warnings(logs) == []


def test_fewer_slots_than_one_layer_picks_are_refused(checkpoint: Checkpoints) -> None:
    backend = ProbeBackend()
    with pytest.raises(ConfigError, match="2 expert slots are fewer than one token's working set of 3"):
        Run(reference(checkpoint("micro")), slots=2, backend=backend)
    assert not any(backend.inner.live().values())
    backend.close()


# ---- values that are not finite


def spoil_gate(run: Run, layer: int, value: float) -> Callable[[], None]:
    """Plant a value in a layer's router weights; the result puts the old one back."""
    args = run.engine.layers[layer].router
    ptr = int(args.args[[p.name for p in args.spec.params].index("w")])
    weight = run.backend.memory.bytes(ptr, 2).view(np.uint16)
    old = weight.copy()
    weight[:] = np.float32(value).view(np.uint32) >> 16

    def restore() -> None:
        weight[:] = old

    return restore


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(
    "settings",
    [{"mode": "eager"}, {"mode": "eager", "device_route": False}, {"mode": "step-graph"}],
    ids=["eager", "host route", "step-graph"],
)
@pytest.mark.parametrize("layer", range(4))
def test_a_router_that_is_not_finite_fails_the_step(
    checkpoint: Checkpoints, layer: int, settings: dict[str, Any], value: float
) -> None:
    """Named by layer and position, and the same token is right once the cause is gone."""
    with Run(reference(checkpoint("micro")), slots=None, **settings) as run:
        run.steps(5)
        run.load()
        restore = spoil_gate(run, layer, value)
        for _ in range(2):
            with pytest.raises(NotFiniteError, match=rf"layer {layer}, position 5: "):
                run.step()
        restore()
        run.steps(5)
        check_counters(run, undisturbed=False)


@pytest.mark.parametrize("word", range(4))
def test_a_header_that_no_kernel_writes_fails_the_step(checkpoint: Checkpoints, word: int) -> None:
    """Garbage in the flag or in a pick of a replay's header is a typed error that changes nothing."""
    with Run(reference(checkpoint("micro")), slots=None) as run:
        run.steps(5)
        arena = run.engine.arena

        def hook(name: str, args: tuple[Any, ...], call: Call) -> Any:
            if "route.headers" in args:
                run.backend.synchronize(run.engine.stream)
                run.backend.memory.bytes(arena.header_row(1) + 4 * word, 4)[:] = 0x7F
            return call()

        with run.hooked(hook), pytest.raises(HeaderError, match="layer 1"):
            run.step()
        run.steps(5)
        check_counters(run, undisturbed=False)
