"""The answer of `explain`: what failed first, where, why, what to do; and what followed from it. As data and as text.

Plain results. Must not know how they were found.
"""

from dataclasses import asdict, dataclass
from typing import Any

from ds41rt.capture.words import plural


@dataclass(frozen=True, slots=True)
class Site:
    """A line of somebody's code; `text` is the statement on it, "" where there is no source."""

    file: str
    line: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


@dataclass(frozen=True, slots=True)
class Related:
    """Another line that has to do with a failure, and what happened there."""

    what: str
    site: Site


@dataclass(frozen=True, slots=True)
class Failure:
    """One call that failed, or a line after which a capture was invalid.

    `call` is the driver's function, None where no library passed it on; `code` likewise. `site` is the line of the
    user's code (of ds41rt, for the engine's own captures), None for what explain itself did; `stack` has all frames,
    innermost first. `before` and `after` are the status of the capture: NONE, ACTIVE or INVALIDATED. `label` is
    ds41rt's name for the work that was captured, or for the last one before it; `layer` is known where the label tells.
    """

    what: str
    call: str | None
    code: int | None
    code_name: str | None
    site: Site | None
    stack: tuple[Site, ...]
    stream: str | None
    label: str | None
    layer: int | None
    before: str
    after: str
    driver_log: str
    rule: str
    fix: str
    hints: tuple[str, ...] = ()
    related: tuple[Related, ...] = ()

    def place(self) -> str:
        return "the capture's begin or end, made by explain" if self.site is None else str(self.site)


@dataclass(frozen=True, slots=True)
class Explanation:
    """What became of a capture. `ok` is true when it succeeded, and `first` is None then. One that is known to have
    captured nothing failed.

    `later` are errors after the first one: they follow from it, or happened on the way out. `captures` and `n_nodes`
    count what was captured well; the nodes of a capture that explain did not end are not known. `notes` say what else
    there was to see.
    """

    subject: str
    ok: bool
    captures: int
    n_nodes: int | None
    first: Failure | None = None
    later: tuple[Failure, ...] = ()
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def to_text(self) -> str:
        """For people: the answer first, then the details, then the later errors."""
        lines = []
        if self.first is None:
            nodes = "" if self.n_nodes is None else f" of {plural(self.n_nodes, 'node')} in all"
            lines.append(f"{self.subject}: captured well, {plural(self.captures, 'graph')}{nodes}")
        else:
            lines += [f"{self.subject}: the capture failed", *_answer(self.first), "", *_details(self.first)]
            if self.later:
                lines += ["", "later errors, after the first one:"]
                lines += [f"  {failure.what}\n    at {failure.place()}" for failure in self.later]
        if self.notes:
            lines.append("")
            lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines)


def _answer(failure: Failure) -> list[str]:
    named = failure.stream is None or repr(failure.stream) in failure.what
    on = [] if named else [f"stream {failure.stream!r}"]
    on += [f"layer {failure.layer}"] if failure.layer is not None else []
    where = failure.place()
    if failure.site is not None and failure.site.text:
        where += f": {failure.site.text}"
    return [
        f"  what:  {failure.what.splitlines()[0]}" + (f" ({', '.join(on)})" if on else ""),
        f"  where: {where}",
        f"  why:   {failure.rule}",
        f"  do:    {failure.fix}",
    ]


def _details(failure: Failure) -> list[str]:
    lines = ["details:"]
    if failure.code is not None:
        lines.append(f"  driver function {failure.call or 'not told'}, code {failure.code} {failure.code_name}")
    if failure.before == failure.after == "NONE":
        lines.append("  no capture was open there")
    else:
        lines.append(f"  the capture was {failure.before} before and {failure.after} after")
    if failure.label is not None:
        lines.append(f"  nearest captured work: {failure.label}")
    lines += [f"  {line}" for line in failure.what.splitlines()[1:] if line.strip()]
    if failure.driver_log:
        lines.append(f"  driver log: {failure.driver_log}")
    lines += [f"  {related.what}: {related.site}" for related in failure.related]
    lines += [f"  hint: {hint}" for hint in failure.hints]
    if failure.stack:
        lines.append("  call stack, innermost first:")
        lines += [f"    {site}" + ("  <-- this line" if site == failure.site else "") for site in failure.stack]
    return lines
