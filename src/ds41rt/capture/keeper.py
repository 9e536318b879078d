"""A backend that remembers what is in its executable graphs: once one exists, nobody can take it apart any more."""

from typing import Any, cast

from ds41rt.cu.backend import GpuBackend, Graph, GraphExec
from ds41rt.cu.graphinfo import GraphInfo


class GraphKeeper:
    """Passes every call on to `backend`, and describes each graph when it is made executable.

    Use `as_backend` where a `GpuBackend` is asked for. For tools and debug modes: every call takes a detour.
    """

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self.infos: dict[GraphExec, GraphInfo] = {}

    @property
    def as_backend(self) -> GpuBackend:
        return cast(GpuBackend, self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def instantiate(self, graph: Graph) -> GraphExec:
        info = self._backend.describe_graph(graph)
        graph_exec = self._backend.instantiate(graph)
        self.infos[graph_exec] = info
        return graph_exec

    def destroy_exec(self, graph_exec: GraphExec) -> None:
        self._backend.destroy_exec(graph_exec)
        self.infos.pop(graph_exec, None)

    def close(self) -> None:
        self.infos.clear()
        self._backend.close()
