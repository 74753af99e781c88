"""What the agent must know of a scheduler, found by attribute: names that a version lacks are left out."""

from typing import Any


def describe(scheduler: Any) -> dict[str, Any]:
    """Arguments of ``kvatlas._agent.Agent.start`` for this scheduler."""
    import vllm

    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    config = scheduler.vllm_config
    parallel = config.parallel_config
    rank = getattr(parallel, "data_parallel_index", None)
    lora = getattr(config, "lora_config", None)
    return {
        "pool": pool,
        "models": served_names(config.model_config),
        "block_size": block_size(scheduler),
        "total_blocks": pool.num_gpu_blocks,
        "groups": groups(scheduler),
        "rank": rank if rank is not None else getattr(parallel, "data_parallel_rank", 0),
        "dp_size": getattr(parallel, "data_parallel_size", 1),
        "max_num_seqs": getattr(config.scheduler_config, "max_num_seqs", 0),
        "max_adapters": getattr(lora, "max_loras", 0) or 0,
        "engine_version": getattr(vllm, "__version__", ""),
        "doubt": doubt(scheduler),
    }


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
    return managers[0].block_size if managers else scheduler.block_size


def groups(scheduler: Any) -> list[tuple[str, int, int]]:
    """Kind, block size and window of each KV cache group."""
    manager = scheduler.kv_cache_manager
    managers = getattr(manager.coordinator, "single_type_managers", ())
    told = getattr(manager, "kv_cache_event_metadata", None)
    out = []
    for at, group in enumerate(scheduler.kv_cache_config.kv_cache_groups):
        spec = group.kv_cache_spec
        size = managers[at].block_size if at < len(managers) else spec.block_size
        window = getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None) or 0
        full = any(cls.__name__ == "FullAttentionSpec" for cls in type(spec).__mro__)
        kind = told[at][0] if told else "full_attention" if full else type(spec).__name__
        out.append((str(kind), int(size), int(window)))
    return out


def doubt(scheduler: Any) -> str | None:
    """Why hits may end elsewhere than at the closed prefix, if there is a reason."""
    manager = scheduler.kv_cache_manager
    if getattr(manager.coordinator, "use_eagle", False) or getattr(manager.coordinator, "eagle_group_ids", None):
        return "speculative decoding drops the last block of a hit"
    if getattr(scheduler, "prefix_replay_tokens", 0):
        return "short hits are replayed"
    if getattr(scheduler, "aux_output_connector", None) is not None:
        return "a connector caps hits"
    return None
