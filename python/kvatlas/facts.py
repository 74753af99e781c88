"""What the agent must know of a scheduler, found by attribute: names that a version lacks are left out.

``rules`` reads from the running coordinator how long a hit is; ``proto/src/hit.rs`` has the search that they are for.
"""

from __future__ import annotations

import inspect
import math
import re
from typing import Any

from kvatlas import reach

# The newest vLLM whose search for hits is restated in proto/src/hit.rs.
NEWEST = (0, 33, 0)

# Limits of proto/src/hit.rs: what is beyond has no rules.
MAX_SPECS, MAX_UNIT, MAX_ALIGN, MAX_AHEAD = 8, 1 << 16, 1 << 24, 1024


def describe(scheduler: Any) -> dict[str, Any]:
    """Arguments of ``kvatlas._agent.Agent.start`` for this scheduler."""
    import vllm

    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    config = scheduler.vllm_config
    parallel = getattr(config, "parallel_config", None)
    rank = getattr(parallel, "data_parallel_index", None)
    lora = getattr(config, "lora_config", None)
    rules, doubt = how_hits_end(scheduler)
    return {
        "pool": pool,
        "models": served_names(config.model_config),
        "block_size": block_size(scheduler),
        "total_blocks": pool.num_gpu_blocks,
        "groups": groups(scheduler),
        "rank": rank if rank is not None else getattr(parallel, "data_parallel_rank", 0),
        "dp_size": getattr(parallel, "data_parallel_size", 1),
        "max_num_seqs": getattr(getattr(config, "scheduler_config", None), "max_num_seqs", 0),
        "max_adapters": getattr(lora, "max_loras", 0) or 0,
        "max_cached_adapters": getattr(lora, "max_cpu_loras", 0) or 0,
        "gpus": gpus(parallel),
        "engine_version": getattr(vllm, "__version__", ""),
        "rules": rules,
        "doubt": doubt,
        "http": reach.http(parallel),
    }


def gpus(parallel: Any) -> tuple[int, int, list[int] | None]:
    """Which of the visible GPUs this engine's workers take, as they do it (``Worker.init_device``): the engine's place
    among the data-parallel ones of this host, GPUs of each on this host, and vLLM's own list of NVML's numbers where it
    has one. (0, 0, None): all visible ones, where a launcher of its own (Ray, ...) hands them out."""
    elsewhere = (
        getattr(parallel, "distributed_executor_backend", None) in ("ray", "external_launcher")
        or getattr(parallel, "data_parallel_backend", None) == "ray"
    )
    ids = getattr(parallel, "assigned_physical_gpu_ids", None)
    if parallel is None or (elsewhere and ids is None):
        return 0, 0, None
    # A world across several hosts has only a part of itself here.
    world = getattr(parallel, "local_world_size", None) or getattr(parallel, "world_size", None) or 0
    names = ("data_parallel_rank_local", "data_parallel_index", "data_parallel_rank")
    given = (int(getattr(parallel, name)) for name in names if getattr(parallel, name, None) is not None)
    place = next(given, 0)
    alone = getattr(parallel, "nnodes_within_dp", 1) == 1
    return (place if alone else 0), int(world), [int(one) for one in ids] if ids is not None else None


def served_names(model_config: Any) -> list[str]:
    """The first served name, as the engine knows it, then what the command line adds."""
    from kvatlas import arguments

    served = getattr(model_config, "served_model_name", None) or model_config.model
    names = [served] if isinstance(served, str) else list(served)
    told = arguments.values("--served-model-name")
    return list(dict.fromkeys(names + (told if names[0] in told else [])))


def block_size(scheduler: Any) -> int:
    """Tokens a block of the first group, as the pool counts them (already scaled by context parallelism)."""
    managers = getattr(scheduler.kv_cache_manager.coordinator, "single_type_managers", None)
    return int(managers[0].block_size if managers else scheduler.block_size)


def groups(scheduler: Any) -> list[tuple[str, int, int]]:
    """Kind, block size and window of each KV cache group, for people: vLLM's own words where it has some."""
    manager = scheduler.kv_cache_manager
    managers = getattr(manager.coordinator, "single_type_managers", ())
    told = getattr(manager, "kv_cache_event_metadata", None)
    out = []
    for at, group in enumerate(scheduler.kv_cache_config.kv_cache_groups):
        spec = unwrapped(group.kv_cache_spec)
        size = managers[at].block_size if at < len(managers) else spec.block_size
        full = kind(spec) == "full"
        name = told[at][0] if told else "full_attention" if full else type(spec).__name__
        # A window of a group that vLLM treats as full attention limits no hit.
        out.append((str(name), int(size), 0 if full else span(spec)))
    return out


# --- how hits end -----------------------------------------------------------------------------------------------------

# Class names along the ancestors of a spec, and of the manager whose search is used for it.
_KINDS = {
    "FullAttentionSpec": "full",  # with MLA, sinks, quantized, reference windows: the prefix from the start
    "SlidingWindowSpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "mamba",
}
_SEARCHES = {
    "FullAttentionManager": "full",
    "SlidingWindowManager": "window",
    "ChunkedLocalAttentionManager": "chunk",
    "MambaManager": "mamba",
}


class _Unknown(Exception):
    """Why it is not known how hits end, in one line."""


def unwrapped(spec: Any) -> Any:
    """A spec that stands for layers of one type and different sizes: the spec of the first of these layers."""
    inner = getattr(spec, "kv_cache_specs", None)
    return next(iter(inner.values())) if isinstance(inner, dict) and inner else spec


def kind(spec: Any) -> str | None:
    """How a spec limits a hit; ``None`` for what is not known."""
    return next((_KINDS[cls.__name__] for cls in type(spec).__mro__ if cls.__name__ in _KINDS), None)


def span(spec: Any) -> int:
    """Window or chunk in tokens, 0 for the others."""
    return int(getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0)


def rules(scheduler: Any) -> dict[str, Any] | None:
    """The rules of this engine's hits, ``None`` when they are not known. See ``_agent.pyi``."""
    return how_hits_end(scheduler)[0]


def doubt(scheduler: Any) -> str | None:
    """Why the rules are not known."""
    return how_hits_end(scheduler)[1]


def how_hits_end(scheduler: Any) -> tuple[dict[str, Any] | None, str | None]:
    """The rules, or ``None`` and why."""
    try:
        return _rules(scheduler), None
    except _Unknown as why:
        return None, str(why)
    except Exception as error:  # a future version's coordinator: the engine must start
        return None, f"this vLLM's coordinator could not be read ({type(error).__name__}: {error})"


def _rules(scheduler: Any) -> dict[str, Any]:
    manager = scheduler.kv_cache_manager
    coordinator, pool = manager.coordinator, manager.block_pool
    search = _owner(type(coordinator), "find_longest_cache_hit")
    if not manager.enable_caching or search == "KVCacheCoordinatorNoPrefixCache":
        raise _Unknown("prefix caching is off: every hit is 0 tokens long")
    if search not in ("UnitaryKVCacheCoordinator", "HybridKVCacheCoordinator"):
        raise _Unknown(f"hits are searched by {search}, which is not known here")
    if getattr(scheduler, "prefix_replay_tokens", 0):
        raise _Unknown("short hits are replayed")
    if getattr(scheduler, "aux_output_connector", None) is not None:
        raise _Unknown("a connector of further outputs caps hits")
    now, _ = version(scheduler)
    one_kind = search == "UnitaryKVCacheCoordinator"
    specs = [_spec(scheduler, ids) for ids in ([[0]] if one_kind else _joined(coordinator))]
    blocks = [spec["block"] for spec in specs]
    unit = int(getattr(pool, "hash_block_size", None) or blocks[0])
    if not hasattr(pool, "hash_block_size") and set(blocks) != {unit}:
        raise _Unknown("this version hashes blocks of one size only, and its groups have several")
    fine = bool(getattr(coordinator, "enable_partial_hash_hits", False))
    align = blocks[0]
    if fine:
        align = unit
    elif not one_kind:
        whole = getattr(coordinator, "scheduler_block_size", None) or getattr(coordinator, "lcm_block_size", None)
        align = int(whole or math.lcm(*blocks))
    if not one_kind and len(specs) == 1 and (align != blocks[0] or specs[0]["eagle"]):
        # vLLM runs its loop for several kinds then; the agent and the index do not for a single one.
        raise _Unknown("of several kinds of attention only one is cached, with an alignment of its own")
    ahead = int(getattr(pool, "num_hash_lookahead_tokens", 0) or getattr(scheduler, "num_hash_lookahead_tokens", 0) or 0)
    if (
        any(block % unit for block in blocks)
        or align % unit
        or not (1 <= len(specs) <= MAX_SPECS and unit <= MAX_UNIT and ahead <= MAX_AHEAD)
        or max(*blocks, align) > MAX_ALIGN
    ):
        raise _Unknown(f"blocks of {blocks} tokens, hashes of {unit}, hits of {align} do not fit together")
    return {"unit": unit, "align": align, "ahead": ahead, "version": now, "fine": fine, "specs": specs}


def _joined(coordinator: Any) -> list[list[int]]:
    """Groups that a hybrid coordinator looks up together: full attention first, else its own order."""
    joined = getattr(coordinator, "attention_groups", None)
    if joined is not None:  # 0.14: a spec, its groups, the class of its manager
        return [list(one[1]) for one in joined]
    return [list(coordinator.full_attention_group_ids), list(coordinator.other_group_ids)]


def _spec(scheduler: Any, ids: list[int]) -> dict[str, Any]:
    """What limits a hit in these groups, which have one spec."""
    manager = scheduler.kv_cache_manager
    coordinator = manager.coordinator
    spec = unwrapped(scheduler.kv_cache_config.kv_cache_groups[ids[0]].kv_cache_spec)
    of, search = kind(spec), None
    for at in ids:
        one = coordinator.single_type_managers[at]
        search = _owner(type(one), "find_longest_cache_hit")
        if of is None or _SEARCHES.get(search) != of:
            raise _Unknown(f"how {type(spec).__name__} limits hits is not known here (it is searched by {search})")
        if getattr(one, "block_pool", manager.block_pool) is not manager.block_pool:
            raise _Unknown(f"the blocks of {type(spec).__name__} are in a pool of their own")
        if not hasattr(manager.block_pool, "hash_block_size") and one.block_size != spec.block_size:
            now, _ = version(scheduler)
            if now <= (0, 11, 0):
                raise _Unknown("this version's hashes and blocks differ with decode context parallelism")
    size = int(coordinator.single_type_managers[ids[0]].block_size)
    width = span(spec) if of in ("window", "chunk") else 0
    if of in ("window", "chunk") and width <= 0:
        raise _Unknown(f"{type(spec).__name__} has no width")
    return {"kind": of, "block": size, "span": width, "eagle": _drops(coordinator, ids), "groups": ids}


def _drops(coordinator: Any, ids: list[int]) -> bool:
    """Does the coordinator drop a block of what it found in these groups (EAGLE, MTP)?"""
    for name in ("drop_eagle_group_ids", "eagle_group_ids"):  # 0.33, 0.20
        dropping = getattr(coordinator, name, None)
        if dropping is not None:
            return any(at in dropping for at in ids)
    return bool(getattr(coordinator, "use_eagle", False))


def _owner(cls: type, method: str) -> str:
    """The name of the class that defines a method which `cls` has."""
    return next((base.__name__ for base in cls.__mro__ if method in vars(base)), "nobody")


# --- which vLLM it is -------------------------------------------------------------------------------------------------


def _marks(scheduler: Any) -> list[tuple[tuple[int, int, int], bool]]:
    """What came with which version, and is it there? Only what a coordinator of this kind can show."""
    pool = scheduler.kv_cache_manager.block_pool
    coordinator = scheduler.kv_cache_manager.coordinator
    marks = [
        ((0, 11, 0), not isinstance(pool.cached_block_hash_to_block, dict)),
        ((0, 12, 0), hasattr(pool, "hash_block_size")),
        ((0, 20, 0), hasattr(coordinator, "eagle_group_ids")),
        ((0, 24, 0), hasattr(pool, "cache_partial_block")),
        ((0, 26, 0), hasattr(pool, "move_block_hashes")),
        ((0, 30, 0), hasattr(pool, "medium")),
        ((0, 33, 0), hasattr(pool, "num_hash_lookahead_tokens")),
    ]
    if _owner(type(coordinator), "find_longest_cache_hit") == "HybridKVCacheCoordinator":
        marks.append(((0, 14, 0), hasattr(coordinator, "attention_groups")))
    for group in scheduler.kv_cache_config.kv_cache_groups:
        if kind(unwrapped(group.kv_cache_spec)) == "mamba":
            marks.append(((0, 15, 0), hasattr(unwrapped(group.kv_cache_spec), "mamba_cache_mode")))
    return sorted(marks)


def version(scheduler: Any, said: str | None = None) -> tuple[tuple[int, int, int], str | None]:
    """The vLLM whose rules hold, and a line to log when that is not simply what it calls itself.

    A release is believed when its attributes agree. A development version, a fork's, and one that they contradict has
    the newest rules that its attributes allow: those below the first attribute that is not there yet.
    """
    if said is None:
        import vllm

        said = str(getattr(vllm, "__version__", ""))
    release = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?:\.post\d+)?(?:\+.*)?", said)
    parsed = (int(release[1]), int(release[2]), int(release[3] or 0)) if release else None
    if parsed is not None and parsed[:2] > NEWEST[:2]:
        return NEWEST, f"vLLM {said} is newer than this kvatlas: its hits are taken to end as those of {_dots(NEWEST)}"
    marks = _marks(scheduler)
    there = [since for since, present in marks if present]
    absent = [since for since, present in marks if not present]
    if parsed is not None and all(parsed >= since for since in there) and all(parsed < since for since in absent):
        return min(parsed, NEWEST), None
    allowed = _before(absent[0]) if absent else NEWEST
    return allowed, f"vLLM calls itself {said or 'nothing'}: by its attributes its hits end as those of {_dots(allowed)}"


def _before(version: tuple[int, int, int]) -> tuple[int, int, int]:
    """Later than everything below a version: patches are not counted that high."""
    major, minor, patch = version
    return (major, minor, patch - 1) if patch else (major, minor - 1, 999)


def _dots(version: tuple[int, int, int]) -> str:
    return ".".join(map(str, version)).replace(".999", ".x")


def bypassed(manager: Any, request: Any) -> bool:
    """Does this request not read the cache?"""
    if not manager.enable_caching:
        return True
    skips = getattr(request, "skip_reading_prefix_cache", None)
    if skips is None:  # up to 0.11.0
        return getattr(getattr(request, "sampling_params", None), "prompt_logprobs", None) is not None
    return bool(skips)


def parameters(method: Any) -> list[str]:
    """The names of a method's parameters, without ``self``; a wrapper's are those of what it wraps."""
    return [name for name in inspect.signature(method).parameters if name != "self"]
