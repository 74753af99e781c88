"""What is left when vLLM's classes cannot be wrapped: its own event publisher, which is not touched.

A publisher of ours in place of vLLM's would get copies of blocks without their numbers, no truth to compare with, and
from some versions no positions: what it made of them could be wrong without anybody noticing. The index does the same
work where it can be judged: it follows vLLM's own events as ``source: native``, and says of that engine that nothing
proves it to be in step. So the agent is off then, and the log says how to be followed all the same.
"""

from __future__ import annotations

import inspect
import json
import sys
from typing import Any


def advice(vllm_config: Any = None) -> str:
    """How the index can follow this engine without the agent. Never raises."""
    try:
        return _advice(getattr(vllm_config, "kv_events_config", None))
    except Exception:
        return "the index can follow vLLM's own events: list it with source: native"


def _advice(events: Any) -> str:
    if events is not None and getattr(events, "enable_kv_cache_events", False) and events.publisher == "zmq":
        replay = getattr(events, "replay_endpoint", None)
        told = f"events: {events.endpoint}" + (f", replay: {replay}" if replay else "")
        return f"the index can follow this engine's own events: list it in the fleet with source: native, {told}"
    wanted = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557"}
    return (
        f"to be followed without the agent start vLLM with --kv-events-config '{json.dumps(wanted)}' "
        "and list it in the fleet with source: native, events: tcp://<host>:5557"
    )


def let_adapters_live() -> bool:
    """vLLM 0.10.2 and 0.11.0 read ``lora_request.id`` when they announce a block, and there is none: the first request
    with an adapter ends an engine that publishes events. Gives adapters that name; true when it was missing."""
    pool = sys.modules["vllm.v1.core.block_pool"].BlockPool
    from vllm.lora.request import LoRARequest

    caching = inspect.unwrap(getattr(pool, "cache_full_blocks", lambda: None))
    if "id" not in getattr(getattr(caching, "__code__", None), "co_names", ()) or hasattr(LoRARequest, "id"):
        return False
    LoRARequest.id = property(lambda adapter: adapter.lora_int_id)
    return True
