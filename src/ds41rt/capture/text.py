"""A dump in words: what each graph amounts to, how it forks, what memory it uses, what the host reads behind it."""

from collections import Counter
from collections.abc import Iterator

from ds41rt.capture.dump import Dump, Graph
from ds41rt.capture.finding import Finding, name_of
from ds41rt.capture.layout import lay_out
from ds41rt.capture.summary import summarise
from ds41rt.capture.words import plural, size, visible

_MOST_BUFFERS = 12


def render_text(dump: Dump) -> str:
    """For people; every line that `inspect` prints."""
    return "\n".join(map(visible, _lines(dump))) + "\n"


def render_findings(findings: list[Finding]) -> str:
    """For people: two lines a finding, and how many there are."""
    lines = []
    for f in findings:
        where = f"{f.graph}, node {f.node} {f.name}" if f.node is not None else f.graph or "the dump"
        lines += [f"{f.rule}: {where}: {f.why}", f"    {f.todo}"]
    rules = Counter(f.rule for f in findings)
    total = ", ".join(f"{n} {rule}" for rule, n in rules.items())
    lines.append(f"{plural(len(findings), 'finding')}: {total}" if findings else "nothing found")
    return "\n".join(map(visible, lines)) + "\n"


def _lines(dump: Dump) -> Iterator[str]:
    yield dump.title
    for key, value in dump.made_by.items():
        yield f"  {key}: {value}"
    for graph in dump.graphs:
        yield from _graph(graph)


def _graph(graph: Graph) -> Iterator[str]:
    total = summarise(graph, lay_out(graph))
    covers = "" if graph.layers is None else f", layers {graph.layers[0]} to {graph.layers[1] - 1}"
    yield f"{graph.name}{covers}: {plural(len(graph.nodes), 'node')}, {plural(len(graph.edges), 'edge')}"
    yield "  kinds: " + (", ".join(f"{n} {kind}" for kind, n in total.kinds.items()) or "none")
    if total.moved_nbytes is not None:
        unknown = f", {plural(total.n_unknown, 'node')} of unknown weight" if total.n_unknown else ""
        yield f"  moves: {size(total.moved_nbytes)} at least{unknown}"
    if total.heaviest is not None:
        share = 100 * total.layer_nbytes[total.heaviest] / max(total.moved_nbytes or 1, 1)
        heaviest = size(total.layer_nbytes[total.heaviest])
        yield f"  heaviest layer: {total.heaviest} with {heaviest} ({share:.0f} %)"
    starts = total.starts if len(total.starts) > 1 else ()
    for what, nodes in (
        ("starts in parallel with", starts),
        ("forks after", total.forks),
        ("joins before", total.joins),
    ):
        if nodes:
            yield f"  {what}: " + ", ".join(name_of(graph.nodes[i]) for i in nodes)
    yield from _buffers(graph)
    for read in graph.reads_back:
        yield f"  host reads back: {read.what}, {size(read.nbytes)}"


def _buffers(graph: Graph) -> Iterator[str]:
    """The ranges that most nodes use first."""
    uses: Counter[str] = Counter()
    unowned = 0
    for node in graph.nodes:
        places = [place for _, place in node.places]
        uses.update(sorted({place.owner for place in places if place.owner is not None}))
        unowned += sum(place.owner is None for place in places)
    if uses:
        shown = ", ".join(f"{name} ({n})" for name, n in uses.most_common(_MOST_BUFFERS))
        more = f", {len(uses) - _MOST_BUFFERS} more" if len(uses) > _MOST_BUFFERS else ""
        yield f"  memory (nodes that use it): {shown}{more}"
    if unowned:
        yield f"  addresses of unknown memory: {unowned}"
    blind = sum(node.kind == "kernel" and (node.kernel is None or node.kernel.params is None) for node in graph.nodes)
    if blind:
        yield f"  kernels with unknown parameters: {blind}"
