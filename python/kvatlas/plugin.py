"""Wraps vLLM's scheduler, cache manager and block pool, 0.10.2 to 0.33.

Only methods are wrapped here: no thread starts and no socket opens before a scheduler is made, and then in the process
that made it. The original always runs first, with its own arguments; what it returns or raises is passed on unchanged.
An exception of ours is counted, logged once a place, and goes no further; an agent whose hooks of the pool keep failing
is stopped.

Methods are found by name and by the names of their parameters, not by version. Without those that tell what the pool
holds (``_NEEDED``) the agent is off, with one line that names what is missing and how the index can follow the engine
without it (:mod:`kvatlas.publisher` says why no publisher is put in place of vLLM's). Without one of the others the
agent goes on and tells less (``_LESS``). Methods that only newer versions have are wrapped where they are.

Which ways a block's keys change was read in the sources of ten versions from 0.10.2 to 0.33.0; a test reads them again:

- ``BlockPool.cache_full_blocks`` gives a key (since 0.24 it may take others: a partial block became full);
- ``BlockPool.cache_partial_block`` (0.24) gives one that ends inside the block, and may take others;
- ``BlockPool.move_block_hashes`` (0.26) moves all of a block's keys to another block;
- ``BlockPool.get_new_blocks`` and ``evict_blocks`` (0.13) take all of a block's keys;
- ``BlockPool.reset_prefix_cache`` takes all keys of all blocks;
- a manager of Mamba states calls ``BlockPool._maybe_evict_cached_block`` by itself (0.32): see ``_watch_evictions``.

Nothing else does: not ``touch``, ``free_blocks``, nulled blocks of a window, a preemption. Further pools (of offloading
connectors, of a host tier) are not the scheduler's and have no agent.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

from kvatlas import facts, publisher, tiers
from kvatlas._agent import Agent, hook_cached, hook_handed_out

# A child of vLLM's logger, so that the lines appear where vLLM's do.
log = logging.getLogger("vllm.plugins.kvatlas")

_agents: weakref.WeakSet[Agent] = weakref.WeakSet()
_said: set[str] = set()

# Faults in hooks of the pool until its agent is stopped. After each the whole pool is read anew, about 10 ms for
# 100,000 blocks: 0.2 s in an engine's life.
_MOST_FAULTS = 20
_faults: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

# Parameters by which the hooks read a call. A method that lacks one has another shape.
_SHAPES = {
    "cache_full_blocks": (
        ["request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size", "kv_cache_group_id"],
        ["block_mask"],
    ),
    "get_new_blocks": (["num_blocks"], []),
    "reset_prefix_cache": ([], []),
    "cache_partial_block": (
        ["request", "block", "num_tokens", "kv_cache_group_id", "block_size"],
        ["replace_existing_hashes"],
    ),
    "move_block_hashes": (["src_block", "dst_block"], []),
    "evict_blocks": (["block_ids"], []),
}

# Without these nothing is known of the pool.
_NEEDED = [("Scheduler", "__init__"), ("BlockPool", "cache_full_blocks"), ("BlockPool", "get_new_blocks")]
_NEEDED += [("BlockPool", "reset_prefix_cache")]

# Without one of these the agent goes on; what is lost then.
_LESS = {
    ("Scheduler", "add_request"): "arrivals are not told",
    ("Scheduler", "schedule"): "starts of requests are not told",
    ("Scheduler", "update_from_output"): "steps are not counted",
    ("Scheduler", "_free_request"): "ends of requests are told without their reason",
    ("KVCacheManager", "get_computed_blocks"): "delivered tokens are not told, and no prediction is judged",
}


def register() -> None:
    """The entry point. Never raises: vLLM would not catch it."""
    if os.environ.get("KVATLAS_ENABLED", "1").strip().lower() in ("0", "false", "no", "off"):
        return
    try:
        _patch()
    except Exception:
        log.exception("kvatlas is off: vLLM could not be wrapped; %s", publisher.advice())


def found() -> dict[str, Any]:
    """What there is to wrap in this vLLM: ``off`` (reasons why nothing is wrapped), ``less`` (what is lost), ``where``
    (hooks that only some versions have), for people and for ``doctor``. Raises what an import raises."""
    classes = _classes()

    def lacks(name: tuple[str, str]) -> str | None:
        method = _method(classes[name[0]], name[1])
        if method is None:
            return f"{name[0]}.{name[1]} is missing"
        wanted = _SHAPES.get(name[1], ([], []))[0] if name[0] == "BlockPool" else []
        without = [parameter for parameter in wanted if parameter not in facts.parameters(method)]
        return f"{name[0]}.{name[1]} has no {', '.join(without)}" if without else None

    later = [("BlockPool", name) for name in ("evict_blocks", "cache_partial_block", "move_block_hashes")]
    there = [name for name in later if hasattr(classes["BlockPool"], name[1])]
    off = [lacks(name) for name in _NEEDED + there]
    if not any(_method(classes["Scheduler"], name) for name in ("schedule", "update_from_output")):
        off.append("Scheduler.schedule and Scheduler.update_from_output are missing")
    return {
        "off": [reason for reason in off if reason],
        "less": [f"{lacks(name)}: {loss}" for name, loss in _LESS.items() if lacks(name)],
        "where": {f"{cls}.{name}": (cls, name) in there for cls, name in later},
    }


def _classes() -> dict[str, type]:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler

    return {"BlockPool": BlockPool, "KVCacheManager": KVCacheManager, "Scheduler": Scheduler}


def _method(cls: Any, name: str) -> Any:
    """A method, unless it is missing or only an interface's."""
    method = getattr(cls, name, None)
    return method if callable(method) and not getattr(method, "__isabstractmethod__", False) else None


def _patch() -> None:
    classes = _classes()
    what = found()
    if publisher.let_adapters_live():
        log.info("kvatlas: LoRARequest.id was missing, by which this vLLM announces blocks of adapters")
    if what["off"]:
        log.warning("kvatlas is off, this vLLM is unknown: %s; %s", "; ".join(what["off"]), publisher.advice())
        return
    if what["less"]:
        log.warning("kvatlas: this vLLM is unknown: %s", "; ".join(what["less"]))
    hooks = [
        ("Scheduler", "__init__", _made),
        *(("Scheduler", name, _counted(name)) for name in _SCHEDULER),
        ("KVCacheManager", "get_computed_blocks", _looked_up),
        ("KVCacheManager", "get_computed_blocks_for_connector", _looked_up_for_connector),
        ("BlockPool", "cache_full_blocks", hook_cached),
        ("BlockPool", "cache_partial_block", _partly_cached),
        ("BlockPool", "move_block_hashes", _moved),
        ("BlockPool", "get_new_blocks", hook_handed_out),
        ("BlockPool", "evict_blocks", _evicted),
        ("BlockPool", "reset_prefix_cache", _reset),
    ]
    for cls, name, hook in hooks:
        if _method(classes[cls], name) is not None:
            _wrap(classes[cls], name, _guarded(classes[cls], name, hook) if cls == "BlockPool" else hook)
    _watch_evictions()
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


def _guarded(cls: type, name: str, hook: Callable[..., None]) -> Callable[..., None]:
    """A hook of a method that has parameters unknown here (as block_mask once was new, and decided which blocks get a
    key): a call that uses one is a fault."""
    needed, known = _SHAPES[name]
    unknown = [parameter for parameter in facts.parameters(getattr(cls, name)) if parameter not in needed + known]
    if not unknown:
        return hook
    log.warning("kvatlas: %s.%s has parameters unknown here: %s", cls.__name__, name, ", ".join(unknown))

    def guarded(self: Any, result: Any, args: Any, kwargs: Any) -> None:
        used = [parameter for parameter in unknown if kwargs.get(parameter) not in (None, False)]
        if used or len(args) > len(needed + known):
            raise TypeError(f"{name} was called with {', '.join(used) or 'further arguments'}")
        hook(self, result, args, kwargs)

    return guarded


def _fault(owner: Any, name: str) -> None:
    try:
        if name not in _said:
            _said.add(name)
            log.exception("kvatlas: its hook of %s failed; the engine goes on (said once)", name)
        agent = getattr(owner, "_kvatlas", None)
        if agent is None:
            return
        if not hasattr(owner, "null_block"):
            agent.fault(None)
            return
        # A hook of the pool: what the table says of its blocks may be wrong now.
        _faults[agent] = _faults.get(agent, 0) + 1
        if _faults[agent] <= _MOST_FAULTS:
            agent.fault(owner)
        else:
            owner._kvatlas = None
            agent.stop()
            log.error("kvatlas is off: its hooks of the block pool failed %d times; %s", _MOST_FAULTS, publisher.advice())
    except Exception:
        log.debug("kvatlas: a fault could not be counted", exc_info=True)


def _forked() -> None:
    # Threads stay with the parent. The child's own scheduler, if it makes one, starts an agent of its own.
    for agent in list(_agents):
        agent.forget()


def _argument(args: Any, kwargs: Any, at: int, name: str) -> Any:
    return args[at] if len(args) > at else kwargs[name]


# --- the scheduler and its manager ------------------------------------------------------------------------------------


def _made(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    if getattr(scheduler, "_kvatlas", None) is not None:
        return  # a subclass that calls this twice
    manager = scheduler.kv_cache_manager
    manager._kvatlas = None
    try:
        agent = Agent.start(**facts.describe(scheduler))
    except (ValueError, RuntimeError) as error:
        log.error("kvatlas is off: %s", error)
        return
    if agent is None:
        return
    _agents.add(agent)
    scheduler._kvatlas = manager._kvatlas = manager.block_pool._kvatlas = agent
    where = [f"publishes on {agent.events}"] * bool(agent.events) + [f"answers on {agent.control}"] * bool(agent.control)
    log.info("kvatlas: engine %s %s", agent.engine, ", ".join(where) or "dials its index")
    _, note = facts.version(scheduler)
    if note:
        log.warning("kvatlas: %s", note)
    try:
        tiers.follow(scheduler, agent)
    except Exception:
        log.exception("kvatlas: the tiers below the GPU are not followed")
    _wrap_overrides(type(scheduler))
    _wrap_core()
    config = scheduler.vllm_config
    threading.Thread(target=_export, args=(agent, config), name="kvatlas-bundle", daemon=True).start()


def _export(agent: Agent, config: Any) -> None:
    try:
        from kvatlas import bundle

        if not agent.set_bundle(bundle.export(config)):
            log.warning("kvatlas: the tokenizer's bundle is larger than 128 MiB, so it is not served")
    except Exception:
        log.exception("kvatlas: the tokenizer could not be exported; pickers need a local copy of it")


def _agent(owner: Any) -> Agent | None:
    return getattr(owner, "_kvatlas", None)


def _arrived(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(scheduler)
    if agent is not None:
        request = _argument(args, kwargs, 0, "request")
        if scheduler.requests.get(request.request_id) is request:  # else: the next piece of a streamed input
            agent.arrived(request)
            lora = getattr(request, "lora_request", None)
            if lora is not None:
                _adapter_named(scheduler, lora)


def _replaced(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(scheduler)
    if agent is not None:
        agent.replaced(_argument(args, kwargs, 0, "session"))


def _scheduled(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(scheduler)
    if agent is not None:
        agent.scheduled(result)
        agent.step(scheduler, _method(type(scheduler), "update_from_output") is None)
        if _method(type(scheduler), "_free_request") is None:
            for id in result.finished_req_ids:
                agent.finished(id, "")


def _updated(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(scheduler)
    if agent is not None:
        agent.step(scheduler, True)


def _freed(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(scheduler)
    if agent is not None:
        request = _argument(args, kwargs, 0, "request")
        agent.finished(request.request_id, str(request.get_finished_reason()))


# Wrapped where they are: in Scheduler, and in a subclass that overrides them (--scheduler-cls).
_SCHEDULER = {
    "add_request": _arrived,
    "schedule": _scheduled,
    "update_from_output": _updated,
    "_free_request": _freed,
    "_update_request_as_session": _replaced,
}
# How often the hook of each ran: an override that calls the original has been seen already.
_ran = dict.fromkeys(_SCHEDULER, 0)


def _counted(name: str) -> Callable[..., None]:
    hook = _SCHEDULER[name]

    def counted(scheduler: Any, result: Any, args: Any, kwargs: Any) -> None:
        _ran[name] += 1
        hook(scheduler, result, args, kwargs)

    return counted


def _wrap_overrides(cls: type) -> None:
    """A scheduler of somebody's own: what it overrides is wrapped too, and counts where it leaves the original out."""
    for one in cls.__mro__:
        if one.__name__ == "Scheduler":
            return
        for name in _SCHEDULER:
            if callable(vars(one).get(name)) and not getattr(vars(one)[name], "_kvatlas", False):
                _wrap_override(one, name)


def _wrap_override(cls: type, name: str) -> None:
    original = vars(cls)[name]

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = _ran[name]
        result = original(self, *args, **kwargs)
        try:
            if _ran[name] == before:
                _ran[name] += 1
                _SCHEDULER[name](self, result, args, kwargs)
        except Exception:
            _fault(self, name)
        return result

    wrapper._kvatlas = True  # type: ignore[attr-defined]
    setattr(cls, name, wrapper)


def _looked_up(manager: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = getattr(manager, "_kvatlas", _NOBODY)
    if agent is _NOBODY:
        manager._kvatlas = None
        if "scheduler" not in _said:
            _said.add("scheduler")
            log.warning("kvatlas is off: this scheduler is none of vLLM's; %s", publisher.advice())
    elif agent is not None:
        request = _argument(args, kwargs, 0, "request")
        agent.looked_up(request, result, facts.bypassed(manager, request))


_NOBODY: Any = object()


def _looked_up_for_connector(manager: Any, result: Any, args: Any, kwargs: Any) -> None:
    # It ends in get_computed_blocks, whose hook has run, but for a hit that is deeper than all groups agree on, since a
    # connector may bring what is missing (0.27.1). If it does not, the scheduler looks again.
    agent = _agent(manager)
    if agent is not None and result[3]:
        agent.looked_up(_argument(args, kwargs, 0, "request"), result, None)


# --- the block pool ---------------------------------------------------------------------------------------------------


def _partly_cached(pool: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(pool)
    if agent is not None and result is not None:
        needed, known = _SHAPES["cache_partial_block"]
        agent.cached_partial(pool, {**dict(zip(needed + known, args)), **kwargs}, result)


def _moved(pool: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(pool)
    if agent is not None:
        agent.moved(_argument(args, kwargs, 0, "src_block"), _argument(args, kwargs, 1, "dst_block"))


def _evicted(pool: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(pool)
    if agent is not None:
        agent.evicted(_argument(args, kwargs, 0, "block_ids"))


def _reset(pool: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(pool)
    if agent is not None and result:
        agent.cleared()


def _watch_evictions() -> None:
    """Managers that take a block's keys by the pool's own ``_maybe_evict_cached_block``. It runs for every block that is
    handed out too, so it is not wrapped but for the time that such a manager's method runs."""
    managers = sys.modules.get("vllm.v1.core.single_type_kv_cache_manager")
    for cls in [one for one in vars(managers).values() if isinstance(one, type)] if managers else []:
        for name, method in list(vars(cls).items()):
            names = getattr(getattr(method, "__code__", None), "co_names", ())
            if _EVICT in names and not getattr(method, "_kvatlas", False):
                setattr(cls, name, _watched(method))


_EVICT = "_maybe_evict_cached_block"


def _watched(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        pool = self.block_pool
        agent = _agent(pool)
        if agent is None or _EVICT in vars(pool):
            return method(self, *args, **kwargs)

        def evict(block: Any) -> Any:
            result = getattr(type(pool), _EVICT)(pool, block)
            try:
                agent.evicted([block.block_id])
            except Exception:
                _fault(pool, _EVICT)
            return result

        setattr(pool, _EVICT, evict)
        try:
            return method(self, *args, **kwargs)
        finally:
            delattr(pool, _EVICT)

    wrapper._kvatlas = True  # type: ignore[attr-defined]
    return wrapper


# --- the engine core --------------------------------------------------------------------------------------------------

_CORE = ("sleep", "wake_up", "pause_scheduler", "resume_scheduler", "release_kv_cache_memory")


def _adapter_named(scheduler: Any, lora: Any) -> None:
    """Later the adapter may be spoken of by its number alone."""
    names = scheduler.__dict__.setdefault("_kvatlas_adapters", {})
    if lora.lora_int_id in names or len(names) < _MOST_ADAPTERS:
        names[lora.lora_int_id] = lora.lora_name


def _adapter_added(core: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(core.scheduler)
    if agent is not None:
        lora = _argument(args, kwargs, 0, "lora_request")
        _adapter_named(core.scheduler, lora)
        agent.adapter_added(lora.lora_name, bool(getattr(lora, "load_inplace", False)))


def _adapter_removed(core: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(core.scheduler)
    name = getattr(core.scheduler, "_kvatlas_adapters", {}).pop(_argument(args, kwargs, 0, "lora_id"), None)
    if agent is not None and name is not None:
        agent.adapter_removed(name)


def _adapter_pinned(core: Any, result: Any, args: Any, kwargs: Any) -> None:
    agent = _agent(core.scheduler)
    name = getattr(core.scheduler, "_kvatlas_adapters", {}).get(_argument(args, kwargs, 0, "lora_id"))
    if agent is not None and name is not None:
        agent.adapter_pinned(name)


# What is done with adapters outside of a step, by their names or numbers.
_LORA = {"add_lora": _adapter_added, "remove_lora": _adapter_removed, "pin_lora": _adapter_pinned}
# Names kept by number: operators load few.
_MOST_ADAPTERS = 4096


def _wrap_core() -> None:
    """Sleep, wake-up and pause, and adapters. A scheduler is made by an engine core, whose module is there then; it is not loaded
    elsewhere."""
    module = sys.modules.get("vllm.v1.engine.core")
    for cls in [one for one in vars(module).values() if isinstance(one, type)] if module else []:
        if any(base.__name__ == "EngineCore" for base in cls.__mro__):
            for name, hook in [*dict.fromkeys(_CORE, _rested).items(), *_LORA.items()]:
                if callable(vars(cls).get(name)):
                    _wrap(cls, name, hook)


def _rested(core: Any, result: Any, args: Any, kwargs: Any) -> None:
    """After one of :data:`_CORE`: is it asleep, does it take no new work? Asked of the core itself."""
    agent = _agent(core.scheduler)
    if agent is None:
        return
    executor = getattr(core, "model_executor", None)
    paused = getattr(core, "is_scheduler_paused", None)
    for tell, state in [
        ("asleep", bool(getattr(executor, "is_sleeping", False))),
        ("draining", bool(paused()) if callable(paused) else False),
    ]:
        if hasattr(agent, tell):
            getattr(agent, tell)(state)
    if hasattr(result, "add_done_callback"):  # a pause or a sleep that waits for requests to end

        def later(_: Any) -> None:
            try:
                _rested(core, None, (), {})
            except Exception:
                _fault(core.scheduler, "sleep")

        result.add_done_callback(later)
