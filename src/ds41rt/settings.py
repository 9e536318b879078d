"""Run-time switches, read from the environment once per engine: `DS41RT_*` names, and the aliases of older launchers.

A value that is not understood, or a name with our prefix that does not exist, is an error that names it: a misspelt
switch that silently does nothing costs its user a day. Of the launchers' prefix only what looks like a misspelt alias
is one: other programs have switches under it. Precedence: explicit argument, environment, default.
"""

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ds41rt.errors import ConfigError

PREFIX, ALIAS_PREFIX = "DS41RT_", "ATLAS_DS41_"
BackendName = Literal["auto", "host", "cuda"]
IndexKeys = Literal["intended", "reference"]
DirectReads = Literal["auto", "on", "off"]
EvictPolicy = Literal["oldest", "least-used"]

# Names of an earlier design, on with exactly "1".
ALIASES = {
    "ATLAS_DS41_STEP_GRAPH": "step_graph",
    "ATLAS_DS41_STEP_GRAPH_LOG": "step_graph_log",
    "ATLAS_DS41_DEVICE_ROUTE": "device_route",
    "ATLAS_DS41_DEVICE_ROUTE_DIAG": "device_route_diag",
    "ATLAS_DS41_TRACE": "trace",
}
# Has the prefix and is no setting: the tests of this repository read it.
NO_SETTINGS = frozenset({"DS41RT_REQUIRE_GPU"})

_SWITCH = {
    "1": True,
    "true": True,
    "on": True,
    "yes": True,
    "0": False,
    "false": False,
    "off": False,
    "no": False,
}


class Settings(BaseModel):
    """Every switch with its default; field `x` is the environment variable `DS41RT_X`."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    backend: BackendName = "auto"
    step_graph: bool = False
    adaptive: bool = False
    step_graph_log: bool = False
    device_route: bool = True
    device_route_diag: bool = False
    trace: bool = False
    capture_watch: bool = False
    no_engram: bool = False
    expert_cache_gib: float | None = Field(default=None, ge=0, le=1 << 20)
    host_cache_gib: float | None = Field(default=None, ge=0, le=1 << 20)
    evict_policy: EvictPolicy = "least-used"
    evict_random_pct: float = Field(default=8.0, ge=0, le=100)
    max_context: int | None = Field(default=None, ge=1)  # None: 4096, or what the model allows if that is less
    index_keys: IndexKeys = "intended"
    direct_reads: DirectReads = "auto"
    reader_threads: int = Field(default=8, ge=0, le=64)  # 0: the thread that needs an expert reads it
    prefetch: bool = False
    staging_slots: int = Field(default=16, ge=2, le=1024, multiple_of=2)  # a ring of two equal halves

    @classmethod
    def from_env(cls, env: Mapping[str, str], **overrides: Any) -> "Settings":
        """Settings from `env`, then `overrides` (None = not given). Raises `ConfigError` naming variable and value."""
        values: dict[str, Any] = {}
        for variable, raw in env.items():
            if variable.upper().startswith((PREFIX, ALIAS_PREFIX)) and variable not in {*VARIABLES, *NO_SETTINGS}:
                _refuse_unknown(variable, raw)
        for variable, name in VARIABLES.items():
            if variable in env:
                annotation = cls.model_fields[name].annotation
                values[name] = (
                    _parse_alias(variable, env[variable])
                    if variable in ALIASES
                    else _parse(variable, env[variable], annotation)
                )
        unknown = sorted(set(overrides) - set(cls.model_fields))
        if unknown:
            known = ", ".join(sorted(cls.model_fields))
            raise ConfigError(f"{unknown[0]}={overrides[unknown[0]]!r}: there is no such setting; known are {known}")
        values.update({k: v for k, v in overrides.items() if v is not None})
        try:
            return cls(**values)
        except ValidationError as e:
            err = e.errors()[0]
            name = str(err["loc"][0])
            raise ConfigError(f"setting {name} ({PREFIX}{name.upper()}) = {err['input']!r}: {err['msg']}") from e


# Every variable that is read, and the field that it sets. Aliases come first: a field's own variable goes before them.
VARIABLES = ALIASES | {PREFIX + name.upper(): name for name in Settings.model_fields}


def _refuse_unknown(variable: str, raw: str) -> None:
    """For a variable that has a prefix and is in no table: the error says which name was meant, if one is near."""
    prefix = PREFIX if variable.upper().startswith(PREFIX) else ALIAS_PREFIX
    known = {name.removeprefix(prefix): name for name in VARIABLES if name.startswith(prefix)}
    near = get_close_matches(variable.upper().removeprefix(prefix), known, 1)
    if near:
        raise ConfigError(f"{variable}={raw!r}: there is no such setting; use {known[near[0]]}, or unset it")
    if prefix == PREFIX:
        names = ", ".join(sorted(known.values()))
        raise ConfigError(f"{variable}={raw!r}: there is no such setting; unset it; known are {names}")


def _parse_alias(variable: str, raw: str) -> bool:
    if raw not in ("", "0", "1"):
        raise ConfigError(f"{variable}={raw!r} is not understood; use 1 for on, 0 or nothing for off")
    return raw == "1"


def _parse(variable: str, raw: str, annotation: Any) -> Any:
    """One variable's text as its field's type; surrounding blanks are dropped, empty is refused."""
    text = raw.strip()
    choices = get_args(annotation)
    if annotation is bool:
        if text.lower() in _SWITCH:
            return _SWITCH[text.lower()]
        raise ConfigError(f"{variable}={raw!r} is not understood; use 1, true, on, yes, 0, false, off or no")
    if choices and all(isinstance(c, str) for c in choices):
        if text in choices:
            return text
        hint = ""
        if {"on", "off"} <= set(choices):
            if text.lower() in _SWITCH:
                return "on" if _SWITCH[text.lower()] else "off"
            hint = "; 1, true, yes mean on and 0, false, no mean off"
        raise ConfigError(f"{variable}={raw!r} is not understood; use one of {', '.join(choices)}{hint}")
    whole = annotation is int or int in choices
    number: Callable[[str], int | float] = int if whole else float
    try:
        if "_" in text:  # legal in Python's numbers, a slip here
            raise ValueError
        return number(text)
    except ValueError:
        wanted = "a whole number" if whole else "a number"
        raise ConfigError(f"{variable}={raw!r} is not understood; it must be {wanted}") from None
