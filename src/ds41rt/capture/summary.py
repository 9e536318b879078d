"""What a graph amounts to: nodes by kind, bytes moved, the heaviest layer, forks, joins, what the host reads back.

And short names: what to call a node where there is no room for the name of its kernel.
"""

import re
from collections import Counter
from dataclasses import dataclass

from ds41rt.capture.dump import Graph, Node
from ds41rt.capture.layout import Layout


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of one graph.

    `kinds` is in order of frequency. `moved_nbytes` is None where no node's weight is known; `n_unknown` nodes are not
    in it. `layer_nbytes` is in order of the layers and holds those of which a weight is known; `heaviest` is the one
    with the most bytes, the first of equals. Starts, forks and joins are those of the layout.
    """

    kinds: dict[str, int]
    moved_nbytes: int | None
    n_unknown: int
    layer_nbytes: dict[int, int]
    heaviest: int | None
    starts: tuple[int, ...]
    forks: tuple[int, ...]
    joins: tuple[int, ...]
    read_back_nbytes: int


# Kernels of libraries that do whatever their template argument says.
_WRAPPERS = {"Kernel", "Kernel2", "device_kernel"}


def summarise(graph: Graph, layout: Layout) -> Summary:
    kinds = Counter(node.kind for node in graph.nodes)
    known = [node for node in graph.nodes if node.moved_nbytes is not None]
    layers: Counter[int] = Counter()
    for node in known:
        if node.layer is not None:
            layers[node.layer] += node.moved_nbytes or 0
    return Summary(
        kinds=dict(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
        moved_nbytes=sum(node.moved_nbytes or 0 for node in known) if known else None,
        n_unknown=len(graph.nodes) - len(known),
        layer_nbytes=dict(sorted(layers.items())),
        heaviest=min(layers, key=lambda layer: (-layers[layer], layer), default=None),
        starts=layout.starts,
        forks=layout.forks,
        joins=layout.joins,
        read_back_nbytes=sum(read.nbytes for read in graph.reads_back),
    )


def short_name(node: Node) -> str:
    """The label without its layer, else the bare name of the kernel, else the kind."""
    if node.label:
        return re.sub(r"^L\d+\.", "", node.label)
    if node.kernel is not None and node.kernel.name:
        return kernel_name(node.kernel.name)
    return node.kind


def kernel_name(name: str) -> str:
    """`name` without namespaces, template arguments and parameters, mangled or not.

    A library's generic kernel is told apart by the operation in its template arguments: where one of them is called a
    functor, its name follows.
    """
    if name.startswith("_Z"):
        words = _mangled_words(name)
        bare, rest = _mangled_bare(name), words
    else:
        text = re.sub(r"^void ", "", name)
        head = re.split(r"[<(]", text.replace("(anonymous namespace)::", ""), maxsplit=1)[0]
        bare = head.split("::")[-1].strip()
        rest = re.findall(r"\w+", text)
    if bare in _WRAPPERS:
        return next((word for word in rest[rest.index(bare) + 1 :] if len(word) > 1), bare)
    operation = next((word for word in rest if "unctor" in word and word != bare), None)
    if not bare:
        return name
    return f"{bare} {operation}" if operation else bare


def _mangled_bare(name: str) -> str:
    """The last plain name of an Itanium-mangled name before its template arguments: `_ZN2at6nativeE` is `native`."""
    at = 3 if name.startswith("_ZN") else 2
    bare = ""
    while (found := re.compile(r"\d+").match(name, at)) is not None:
        begin = found.end()
        at = begin + int(found[0])
        if at > len(name):
            return ""
        bare = name[begin:at]
    return bare


def _mangled_words(name: str) -> list[str]:
    """All names with a length in front, in order, template arguments included."""
    words, at = [], 0
    while (found := re.compile(r"\d+").search(name, at)) is not None:
        begin = found.end()
        n = int(found[0])
        word = name[begin : begin + n]
        if n and len(word) == n and re.fullmatch(r"[A-Za-z_]\w*", word):
            words.append(word)
            at = begin + n
        else:
            at = begin
    return words
