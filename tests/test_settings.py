"""Settings: every value is understood or refused by name, in the environment and in code."""

from typing import Any

import pytest

from ds41rt.errors import ConfigError
from ds41rt.settings import ALIASES, PREFIX, Settings

BOOLS = sorted(n for n, f in Settings.model_fields.items() if f.annotation is bool)
YES, NO = ("1", "true", "TRUE", "on", "On", "yes", " 1 ", "\ttrue\n"), ("0", "false", "off", "no", " 0 ", "OFF")


def refused(*said: str, **env: str) -> None:
    with pytest.raises(ConfigError) as e:
        Settings.from_env(env)
    for text in said:
        assert text in str(e.value)


def test_defaults() -> None:
    assert Settings.from_env({}) == Settings()
    assert Settings.from_env({"PATH": "/bin", "DS41": "1", "XDS41RT_TRACE": "1"}) == Settings()


@pytest.mark.parametrize("name", BOOLS)
def test_switches(name: str) -> None:
    variable = PREFIX + name.upper()
    for raw in YES:
        assert getattr(Settings.from_env({variable: raw}), name) is True
    for raw in NO:
        assert getattr(Settings.from_env({variable: raw}), name) is False
    for raw in ("", " ", "2", "-1", "1.0", "ture", "y", "enable", "none", "1 1", "\udcff"):
        refused(variable, repr(raw), **{variable: raw})


@pytest.mark.parametrize(
    ("name", "understood", "not_understood"),
    [
        ("backend", {"host": "host", " cuda ": "cuda", "auto": "auto"}, ["", "HOST", "gpu", "1"]),
        ("index_keys", {"intended": "intended", "reference\n": "reference"}, ["", "own", "0"]),
        (
            "direct_reads",
            {
                "auto": "auto",
                " on ": "on",
                "off\n": "off",
                "1": "on",
                "true": "on",
                "YES": "on",
                "On": "on",
                "0": "off",
                "False": "off",
                "no": "off",
                " OFF": "off",
            },
            ["", "2", "Auto", "direct", "none", "o_direct"],
        ),
        ("reader_threads", {"0": 0, "1": 1, " 64 ": 64}, ["", "65", "-1", "8.0", "auto", "on"]),
        ("staging_slots", {"2": 2, "16": 16, "1024": 1024}, ["", "0", "1", "3", "17", "1025", "1026", "-2", "auto"]),
        ("max_context", {"1": 1, " 4096 ": 4096, "+7": 7}, ["", "0", "-1", "4k", "1e3", "2.0", "1_000", "0x10", "on"]),
        (
            "expert_cache_gib",
            {"0": 0.0, "1": 1.0, " 0.5 ": 0.5, "1e-3": 0.001},
            ["", "-1", "-1e-9", "nan", "inf", "1e999", "1_0", "4GiB", "1,5", "true"],
        ),
        (
            "host_cache_gib",
            {"0": 0.0, "60": 60.0, " 0.5 ": 0.5},
            ["", "-1", "nan", "inf", "1_0", "4GiB", "true"],
        ),
        ("evict_policy", {"oldest": "oldest", " least-used ": "least-used"}, ["", "lru", "Oldest", "0"]),
        (
            "evict_random_pct",
            {"0": 0.0, "8": 8.0, "100": 100.0},
            ["", "-0.1", "100.1", "nan", "inf", "8%", "off"],
        ),
    ],
)
def test_values(name: str, understood: dict[str, Any], not_understood: list[str]) -> None:
    variable = PREFIX + name.upper()
    for raw, value in understood.items():
        found = getattr(Settings.from_env({variable: raw}), name)
        assert (found, type(found)) == (value, type(value))
    for raw in not_understood:
        refused(variable, **{variable: raw})


def test_refusals_say_what_is_understood() -> None:
    choices = "use one of auto, on, off; 1, true, yes mean on and 0, false, no mean off"
    refused("DS41RT_DIRECT_READS='maybe'", choices, DS41RT_DIRECT_READS="maybe")
    refused("staging_slots", "17", "multiple of 2", DS41RT_STAGING_SLOTS="17")
    refused("reader_threads", "65", "less than or equal to 64", DS41RT_READER_THREADS="65")
    for variable in ("DS41RT_BACKEND", "DS41RT_INDEX_KEYS"):  # no switches: their choices have no on and off
        for raw in ("1", "off"):
            refused(variable, repr(raw), **{variable: raw})


@pytest.mark.parametrize(
    "name", ["DS41RT_STEP_GRPAH", "DS41RT_STEPGRAPH", "DS41RT_", "DS41RT_Step_Graph", "ds41rt_step_graph", "DS41RT_X"]
)
def test_misspelt_name(name: str) -> None:
    refused(name, "no such setting", "DS41RT_STEP_GRAPH", **{name: "1"})


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("DS41RT_STEP_GRPAH", "DS41RT_STEP_GRAPH"),
        ("DS41RT_EXPERT_CACHE_GB", "DS41RT_EXPERT_CACHE_GIB"),
        ("DS41RT_backend", "DS41RT_BACKEND"),
        ("ATLAS_DS41_STEP_GRPAH", "ATLAS_DS41_STEP_GRAPH"),
        ("atlas_ds41_trace", "ATLAS_DS41_TRACE"),
        ("ATLAS_DS41_DEVICE_ROUTE_DIAGS", "ATLAS_DS41_DEVICE_ROUTE_DIAG"),
    ],
)
def test_the_name_that_was_meant(name: str, meant: str) -> None:
    refused(f"{name}='1': there is no such setting; use {meant}, or unset it", **{name: "1"})


def test_a_name_that_is_near_to_none() -> None:
    """Of ours an error. The launchers' prefix belongs to other programs too."""
    assert Settings.from_env({"ATLAS_DS41_KV": "fp8"}) == Settings()
    refused("DS41RT_='1'", "unset it; known are DS41RT_ADAPTIVE, ", DS41RT_="1")


def test_what_the_tests_read_is_no_setting_and_no_mistake() -> None:
    assert Settings.from_env({"DS41RT_REQUIRE_GPU": "1"}) == Settings()
    refused("DS41RT_REQUIRE_GPUS", DS41RT_REQUIRE_GPUS="1")


def test_every_field_has_a_variable_and_one_only() -> None:
    """The names in the refusal are the names that work."""
    with pytest.raises(ConfigError) as e:
        Settings.from_env({"DS41RT_X": ""})
    listed = str(e.value).split("known are ")[1].split(", ")
    assert listed == sorted(PREFIX + n.upper() for n in Settings.model_fields)


def test_argument_beats_environment_beats_default() -> None:
    env = {"DS41RT_BACKEND": "cuda", "DS41RT_MAX_CONTEXT": "77", "DS41RT_DEVICE_ROUTE": "off"}
    settings = Settings.from_env(env, backend="host", max_context=None, step_graph=True)
    assert settings == Settings(backend="host", max_context=77, device_route=False, step_graph=True)
    assert Settings.from_env({"DS41RT_STEP_GRAPH": "1"}, step_graph=False).step_graph is False


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_context", 2.0), ("max_context", "64"), ("max_context", True), ("step_graph", 1), ("step_graph", "yes"),
        ("expert_cache_gib", float("inf")), ("backend", "Host"), ("nonsense", 1),
        ("direct_reads", True), ("reader_threads", 8.0), ("staging_slots", "16"), ("staging_slots", 15),
    ],
)  # fmt: skip
def test_argument_of_the_wrong_kind(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=name):
        Settings.from_env({}, **{name: value})


def test_aliases_are_on_with_exactly_1() -> None:
    for alias, name in ALIASES.items():
        assert getattr(Settings.from_env({alias: "1"}), name) is True
        for raw in ("", "0"):
            assert getattr(Settings.from_env({alias: raw}), name) is False
        for raw in ("true", " 1 ", "2", "off"):
            refused(alias, repr(raw), **{alias: raw})


def test_own_name_beats_alias() -> None:
    env = {"ATLAS_DS41_STEP_GRAPH": "1", "DS41RT_STEP_GRAPH": "0"}
    assert Settings.from_env(env).step_graph is False


def test_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Settings().step_graph = True
