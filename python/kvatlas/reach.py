"""How a gateway reaches this engine: where its API server listens, and which rank to ask for there.

The engine's own process knows neither for sure: both are on the command line of the API server, which its engines
inherit, and in the parallel configuration.
"""

from __future__ import annotations

import sys
from typing import Any

from kvatlas import arguments

# vLLM's default.
PORT = 8000


def http(parallel: Any) -> tuple[str | None, int | None, int | None]:
    """Host (None: every one of this pod), port (None: no API server), and the rank to ask for by header (None: that
    server has this rank alone)."""
    if arguments.given("--uds") or not _serves():
        return (None, None, None)
    host, port = arguments.value("--host"), _number("--port", PORT)
    rank = getattr(parallel, "data_parallel_index", None)
    rank = rank if rank is not None else getattr(parallel, "data_parallel_rank", 0) or 0
    local = getattr(parallel, "data_parallel_rank_local", None)
    size = max(getattr(parallel, "data_parallel_size", 1) or 1, _number("--data-parallel-size", 1), _number("-dp", 1))
    if arguments.given("--data-parallel-multi-port-external-lb"):
        # One supervisor, a server for each of its ranks on ports in a row.
        per_node = _number("--data-parallel-size-local", 0) or _number("-dpl", 0)
        first = _number("--data-parallel-start-rank", _number("--node-rank", 0) * per_node)
        return (host, port + rank - first, None)
    if size <= 1 or _given("data_parallel_external_lb", "--data-parallel-external-lb", parallel) or _own_server():
        return (host, port, None)  # a server of its own
    if _given("data_parallel_hybrid_lb", "--data-parallel-hybrid-lb", parallel):
        # A server for each node, which counts the ranks of its node from 0.
        first = _number("--data-parallel-start-rank", 0) or _number("-dpr", 0)
        return (host, port, local if local is not None else max(rank - first, 0))
    if arguments.given("--headless"):
        # One server for all nodes, on the first one. Its port is on its own command line, not on this one.
        return (getattr(parallel, "data_parallel_master_ip", None), port, rank)
    return (host, port, rank)


def _serves() -> bool:
    # "vllm serve", or the module of the server; a program of somebody's own that makes an LLM has no server.
    words = sys.argv[:2]
    return "serve" in words[1:] or "api_server" in (words[0] if words else "") or arguments.given("--port")


def _own_server() -> bool:
    # `--data-parallel-rank` on the command line: one API server a rank.
    return arguments.given("--data-parallel-rank") or arguments.given("-dpn")


def _given(name: str, option: str, parallel: Any) -> bool:
    return bool(getattr(parallel, name, False)) or arguments.given(option)


def _number(option: str, default: int) -> int:
    try:
        return int(arguments.value(option) or default)
    except ValueError:
        return default
