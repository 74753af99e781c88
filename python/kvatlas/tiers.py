"""Tiers below the GPU: what KV connectors report of them is passed to the agent, and on to vLLM unchanged."""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger("vllm.plugins.kvatlas")

# Connectors that report removals too. What others report is believed for ten minutes only.
_LASTING = {"OffloadingConnector", "SimpleCPUOffloadConnector"}


def follow(scheduler: Any, agent: Any) -> None:
    """Follows the scheduler's connector, if it has one that reports."""
    connector = getattr(scheduler, "connector", None)
    if connector is None or not callable(getattr(connector, "take_events", None)):
        return
    config = getattr(scheduler.vllm_config, "kv_events_config", None)
    if not getattr(config, "enable_kv_cache_events", False):
        log.warning(
            "kvatlas: what %s holds below the GPU is not known: connectors report only with --kv-events-config "
            '\'{"enable_kv_cache_events": true, "publisher": "null"}\' (before vLLM 0.11.1: with "zmq")',
            type(connector).__name__,
        )
        return
    agent.follow_tiers(factor(connector), all(name in _LASTING for name in names(connector)))
    original = connector.take_events

    def take_events() -> Any:
        # It may be a generator that can be read once: what was read is passed on as a list.
        events = list(original() or ())
        try:
            if events:
                agent.reported(events)
        except Exception:
            agent.fault()
        return events

    connector.take_events = take_events


def names(connector: Any) -> list[str]:
    """Class names of a connector, or of those that it chains."""
    inner = getattr(connector, "_connectors", None)
    return [name for one in inner for name in names(one)] if inner else [type(connector).__name__]


def factor(connector: Any) -> int:
    """How many blocks of the GPU make one below, 1 where it is not told."""
    for one in getattr(connector, "_connectors", None) or [connector]:
        scheduler = getattr(one, "connector_scheduler", None)
        for holder in (scheduler, getattr(scheduler, "config", None)):
            for name in ("blocks_per_chunk", "block_size_factor"):
                value = getattr(holder, name, None)
                if isinstance(value, int) and value > 0:
                    return value
    return 1
