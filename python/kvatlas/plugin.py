"""Wraps vLLM's scheduler, cache manager and block pool.

Only methods are wrapped here: no thread starts and no socket opens before a scheduler is made, and then in the process
that made it. The original always runs first, with its own arguments; what it returns or raises is passed on unchanged.
An exception of ours is counted, logged once a place, and goes no further.
"""

import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

from kvatlas import facts
from kvatlas._agent import Agent, hook_cached, hook_handed_out

# A child of vLLM's logger, so that the lines appear where vLLM's do.
log = logging.getLogger("vllm.plugins.kvatlas")

_agents: "weakref.WeakSet[Agent]" = weakref.WeakSet()
_said: set[str] = set()


def register() -> None:
    """The entry point. Never raises: vLLM would not catch it."""
    if os.environ.get("KVATLAS_ENABLED", "1").strip().lower() in ("0", "false", "no", "off"):
        return
    try:
        _patch()
    except Exception:
        log.exception("kvatlas is off: vLLM could not be wrapped")


def _patch() -> None:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    needed = [
        (Scheduler, "__init__", _made),
        (Scheduler, "add_request", _arrived),
        (Scheduler, "schedule", _scheduled),
        (Scheduler, "update_from_output", _updated),
        (Scheduler, "_free_request", _freed),
        (KVCacheManager, "get_computed_blocks", _looked_up),
        (BlockPool, "cache_full_blocks", hook_cached),
        (BlockPool, "get_new_blocks", hook_handed_out),
        (BlockPool, "reset_prefix_cache", _reset),
    ]
    where_present = [
        (Scheduler, "_update_request_as_session", _replaced),
        (BlockPool, "evict_blocks", _evicted),
    ]
    missing = [f"{cls.__name__}.{name}" for cls, name, _ in needed if not callable(getattr(cls, name, None))]
    if missing:
        log.warning("kvatlas is off: this vLLM has no %s", ", ".join(missing))
        return
    for cls, name, hook in needed + where_present:
        if callable(getattr(cls, name, None)):
            _wrap(cls, name, hook)
    os.register_at_fork(after_in_child=_forked)


def _wrap(cls: type, name: str, hook: Callable[..., None]) -> None:
    original = getattr(cls, name)
    if getattr(original, "_kvatlas", False):
        return

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        try:
            hook(self, result, args, kwargs)
        except Exception:
            _fault(self, name)
        return result

    wrapper._kvatlas = True  # type: ignore[attr-defined]
    setattr(cls, name, wrapper)


def _fault(owner: Any, name: str) -> None:
    try:
        if name not in _said:
            _said.add(name)
            log.exception("kvatlas: its hook of %s failed; the engine goes on (said once)", name)
        agent = getattr(owner, "_kvatlas", None)
        if agent is not None:
            # A hook of the pool: what the table says of its blocks may be wrong now.
            agent.fault(owner if hasattr(owner, "null_block") else None)
    except Exception:
        log.debug("kvatlas: a fault could not be counted", exc_info=True)


def _forked() -> None:
    # Threads stay with the parent. The child's own scheduler, if it makes one, starts an agent of its own.
    for agent in list(_agents):
        agent.forget()


def _made(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    if getattr(scheduler, "_kvatlas", None) is not None:
        return  # a subclass that calls this twice
    try:
        agent = Agent.start(**facts.describe(scheduler))
    except ValueError as error:
        log.error("kvatlas is off: %s", error)
        return
    if agent is None:
        return
    manager = scheduler.kv_cache_manager
    _agents.add(agent)
    scheduler._kvatlas = manager._kvatlas = manager.block_pool._kvatlas = agent
    log.info("kvatlas: engine %s publishes on %s, answers on %s", agent.engine, agent.events, agent.control)
    config = scheduler.vllm_config
    threading.Thread(target=_export, args=(agent, config), name="kvatlas-bundle", daemon=True).start()


def _export(agent: Agent, config: Any) -> None:
    try:
        from kvatlas import bundle

        if not agent.set_bundle(bundle.export(config)):
            log.warning("kvatlas: the tokenizer's bundle is larger than 128 MiB, so it is not served")
    except Exception:
        log.exception("kvatlas: the tokenizer could not be exported; pickers need a local copy of it")


def _arrived(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = getattr(scheduler, "_kvatlas", None)
    if agent is not None:
        request = args[0] if args else kwargs["request"]
        if scheduler.requests.get(request.request_id) is request:  # else: the next piece of a streamed input
            agent.arrived(request)


def _replaced(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = getattr(scheduler, "_kvatlas", None)
    if agent is not None:
        agent.replaced(args[0] if args else kwargs["session"])


def _scheduled(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = getattr(scheduler, "_kvatlas", None)
    if agent is not None:
        agent.scheduled(result)
        agent.step(scheduler, False)


def _updated(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = getattr(scheduler, "_kvatlas", None)
    if agent is not None:
        agent.step(scheduler, True)


def _freed(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = getattr(scheduler, "_kvatlas", None)
    if agent is not None:
        request = args[0] if args else kwargs["request"]
        agent.finished(request.request_id, str(request.get_finished_reason()))


def _looked_up(manager: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = getattr(manager, "_kvatlas", None)
    if agent is not None:
        request = args[0] if args else kwargs["request"]
        bypassed = not manager.enable_caching or bool(getattr(request, "skip_reading_prefix_cache", False))
        agent.looked_up(request, result, bypassed)


def _evicted(pool: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = getattr(pool, "_kvatlas", None)
    if agent is not None:
        agent.evicted(args[0] if args else kwargs["block_ids"])


def _reset(pool: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = getattr(pool, "_kvatlas", None)
    if agent is not None and result:
        agent.cleared()
