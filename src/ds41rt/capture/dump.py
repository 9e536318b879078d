"""The dump of captured graphs: a versioned schema, what every tool here reads and writes.

A dump is plain data that outlives the graphs, their process and their machine. This file must not know where a dump
comes from, nor what is right or wrong about it.
"""

import json
import reprlib
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_core import ErrorDetails

from ds41rt.capture.words import visible
from ds41rt.errors import InputError

SCHEMA = "ds41rt.capture"
VERSION = 1

Space = Literal["device", "pinned", "pageable", "unknown"]
Access = Literal["r", "w", "rw"]
Triple = tuple[int, int, int]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Place(_Record):
    """A memory range that a node uses, and whose memory it is.

    `owner` names the range of `Dump.ranges` that holds `addr`, None if no known range does; `owner_off` is the distance
    from its beginning. `nbytes` is None where only an address is known. `access` is None where nobody declared it.
    """

    addr: int = Field(ge=0)
    nbytes: int | None = Field(default=None, ge=0)
    space: Space = "unknown"
    owner: str | None = None
    owner_off: int = 0
    access: Access | None = None


class Inside(_Record):
    """An address inside a parameter that is a structure: `off` bytes from the parameter's beginning."""

    off: int = Field(ge=0)
    place: Place


class Param(_Record):
    """One kernel parameter: its place in the parameter block, its bytes, and what is known of their meaning.

    Name and type are known for declared kernels ("bf16*", "u32"), None for others; of those the bytes are all there is,
    and `place` and `inside` are guesses: 8 aligned bytes that are an address in a known range.
    """

    off: int = Field(ge=0)
    raw: Annotated[str, Field(pattern="^([0-9a-f]{2})*$")]
    name: str | None = None
    type: str | None = None
    value: int | float | None = None
    place: Place | None = None
    inside: tuple[Inside, ...] = ()

    @property
    def nbytes(self) -> int:
        return len(self.raw) // 2


class Kernel(_Record):
    """`params` is None where the driver cannot tell. `reads_through` are places behind pointers in device memory."""

    name: str | None
    grid: Triple | None = None
    block: Triple | None = None
    shared_nbytes: int = 0
    params: tuple[Param, ...] | None = None
    reads_through: bool = False


class Copy(_Record):
    """A copy of `nbytes`; each side's place carries its space."""

    dst: Place
    src: Place
    nbytes: int = Field(ge=0)


class Fill(_Record):
    dst: Place
    value: int
    element_nbytes: int
    nbytes: int = Field(ge=0)


class Node(_Record):
    """One node. `deps` are the indices of the nodes right before it. `kind` is one of the driver's node types: kernel,
    copy, fill, host, graph, empty, "wait event", "record event", alloc, free, other.

    `label` and `stream` are what the capturing call said, None for foreign graphs; `layer` is parsed by whoever knows
    the labels. `moved_nbytes` is how many bytes the node moves at least, None if unknown: a measure of its weight.
    """

    index: int = Field(ge=0)
    kind: str
    deps: tuple[int, ...] = ()
    label: str | None = None
    stream: str | None = None
    layer: int | None = None
    moved_nbytes: int | None = Field(default=None, ge=0)
    kernel: Kernel | None = None
    copy_: Copy | None = Field(default=None, alias="copy")
    fill: Fill | None = None

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @property
    def places(self) -> tuple[tuple[str, Place], ...]:
        """(role, place) of all memory that the node names: a parameter's name or offset, "src", "dst"."""
        found: list[tuple[str, Place]] = []
        if self.kernel is not None:
            for param in self.kernel.params or ():
                role = param.name or f"parameter at {param.off}"
                if param.place is not None:
                    found.append((role, param.place))
                found += [(f"{role}, byte {at.off}", at.place) for at in param.inside]
        if self.copy_ is not None:
            found += [("dst", self.copy_.dst), ("src", self.copy_.src)]
        if self.fill is not None:
            found.append(("dst", self.fill.dst))
        return tuple(found)


class ReadBack(_Record):
    """What the host reads after a launch of the graph."""

    what: str
    nbytes: int = Field(ge=0)
    place: Place | None = None


class Graph(_Record):
    """One captured graph. `layers` are the layers it covers, first and one past the last, for a step segment."""

    name: str
    nodes: tuple[Node, ...]
    layers: tuple[int, int] | None = None
    moe_layers: tuple[int, ...] = ()
    reads_back: tuple[ReadBack, ...] = ()

    @model_validator(mode="after")
    def _edges_exist(self) -> "Graph":
        for i, node in enumerate(self.nodes):
            if node.index != i:
                raise ValueError(f"graph {self.name!r}: node {i} says it is node {node.index}")
            for dep in node.deps:
                if not 0 <= dep < len(self.nodes) or dep == i:
                    raise ValueError(f"graph {self.name!r}: node {i} depends on node {dep}, which is not there")
        return self

    @property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(before, after) pairs of node indices."""
        return tuple((dep, node.index) for node in self.nodes for dep in node.deps)


class Range(_Record):
    """Memory with a name: an allocation in the ledger, a range that a caller registered, or what the driver said."""

    name: str
    addr: int = Field(ge=0)
    nbytes: int = Field(ge=0)
    space: Space
    source: Literal["ledger", "caller", "driver"]
    freed: bool = False


class Dump(_Record):
    """Graphs and the memory they use, as they were at one moment. `made_by` is free text by key: version, device.

    `complete`: an address in none of `ranges` was in no allocation. False where nobody could tell.
    """

    schema_: Literal["ds41rt.capture"] = Field(default="ds41rt.capture", alias="schema")
    version: Literal[1] = 1
    title: str
    made_by: dict[str, str] = {}
    graphs: tuple[Graph, ...]
    ranges: tuple[Range, ...] = ()
    complete: bool = True

    model_config = ConfigDict(frozen=True, extra="forbid", populate_by_name=True)

    @field_validator("graphs")
    @classmethod
    def _names_differ(cls, graphs: tuple[Graph, ...]) -> tuple[Graph, ...]:
        names = [graph.name for graph in graphs]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ValueError(f"two graphs are called {twice!r}")
        return graphs

    def to_json(self) -> str:
        return self.model_dump_json(by_alias=True, exclude_defaults=False) + "\n"


def check_dump(given: object) -> None:
    """Raises `InputError` for anything but a dump: these functions are called by hand, with what a file is called."""
    if not isinstance(given, Dump):
        raise InputError(f"{reprlib.repr(given)} is no Dump; inspect_graph makes one, load_dump reads one from a file")


def parse_dump(text: str | bytes, where: str) -> Dump:
    """A dump from its JSON text. Raises `InputError` naming `where`, and what is wrong with it."""
    try:
        raw: Any = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise InputError(f"{where}: is not a capture dump: not valid JSON: {e}") from e
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        raise InputError(f"{where}: is not a capture dump: there is no field schema = {SCHEMA!r}")
    version = raw.get("version")
    if type(version) is not int or version < 1:
        found = "is missing" if "version" not in raw else f"is {reprlib.repr(version)}"
        raise InputError(f"{where}: is a damaged capture dump: version {found}, must be a whole number from 1 on")
    if version > VERSION:
        raise InputError(
            f"{where}: has version {version} of the dump schema, this build reads up to {VERSION}; update ds41rt"
        )
    try:
        return Dump.model_validate(raw)
    except ValidationError as e:
        first = e.errors()[0]
        at = visible(".".join(map(str, first["loc"]))) or "the dump"
        raise InputError(f"{where}: is a damaged capture dump: {at}: {_said(first)}") from e


def _said(error: ErrorDetails) -> str:
    """What is wrong, in our words where the schema's are about its own."""
    if error["type"] == "missing":
        return "is missing"
    if error["type"] == "extra_forbidden":
        return "is no field of the schema"
    if error["type"] == "value_error":  # ours already
        return str(error["ctx"]["error"])
    wanted = error["msg"][:1].lower() + error["msg"][1:]
    return f"is {reprlib.repr(error['input'])}; {wanted.replace('input should', 'it should')}"


def load_dump(path: str | Path) -> Dump:
    """A dump from a file. Raises `InputError` for a file that cannot be read or is no dump of a version we know."""
    try:
        return parse_dump(Path(path).read_bytes(), str(path))
    except OSError as e:
        raise InputError(f"{path}: cannot be read: {e.strerror}") from e
