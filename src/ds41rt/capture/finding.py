"""What a lint rule says about a graph or one of its nodes."""

from dataclasses import dataclass

from ds41rt.capture.dump import Node


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong: the rule's id, where, what it is and why it matters, what to do.

    `graph` is the graph's name, "" for a finding about the whole dump; `node` is the node's index in it, None for a
    finding about the whole graph. `name` is what to call the node: its label, or its kernel.
    """

    rule: str
    graph: str
    node: int | None
    name: str
    why: str
    todo: str


def name_of(node: Node) -> str:
    """What to call a node in a sentence: its label, else its kernel, else its kind and number."""
    if node.label:
        return node.label
    if node.kernel is not None and node.kernel.name:
        return node.kernel.name
    return f"{node.kind} {node.index}"
