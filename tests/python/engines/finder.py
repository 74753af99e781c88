"""The search for a hit's end by itself: random residency in the engine's own map, the engine's own coordinator."""

import random
from typing import Any

import msgspec
from engine import VERSION, Case, Engine, Group
from kvatlas._agent import find_hit
from vllm.v1.core import kv_cache_utils


def rule(engine: Engine) -> bytes:
    """What decides this engine's hits, read off the case and the coordinator."""
    case, coordinator = engine.case, engine.kv_cache_manager.coordinator
    unit, fine = engine.hash_block_size, bool(getattr(coordinator, "enable_partial_hash_hits", False))
    flagged = any(group.eagle for group in case.groups)
    specs, sets = [], iter(range(1, 8))
    for spec, members in case.specs():
        flags = [case.groups[member].eagle for member in members] if flagged and VERSION >= (0, 20) else [case.eagle]
        whole = 0 if spec.kind == "full" and not specs else next(sets)
        partial = next(sets) if fine and spec.kind == "full" and spec.block > unit else None
        drops = any(flags) and not case.ahead
        specs.append(dict(kind=spec.kind, block=spec.block, span=spec.span, eagle=drops, set=whole, partial=partial))
    align = unit if fine else engine.block_size
    out = dict(unit=unit, align=align, ahead=case.ahead, version=list(VERSION), fine=fine, specs=specs)
    return msgspec.msgpack.encode(out)


def fill(spec: Group, blocks: int, rnd: random.Random) -> list[bool]:
    """Which blocks of one group are there."""
    if spec.kind == "mamba":
        return [rnd.random() < 0.3 for _ in range(blocks)]
    if spec.kind == "full":
        whole = blocks if rnd.random() < 0.3 else rnd.randrange(blocks + 1)
        bits = [at < whole or at > whole and rnd.random() < 0.5 for at in range(blocks)]
        if blocks and rnd.random() < 0.3:
            bits[rnd.randrange(blocks)] = False
        return bits
    if rnd.random() < 0.5:
        likely = rnd.choice((0.6, 0.8, 0.9, 0.95))
        return [rnd.random() < likely for _ in range(blocks)]
    bits = []
    while len(bits) < blocks:
        bits += [True] * rnd.randrange(1, 9) + [False] * rnd.randrange(1, 4)
    return bits[:blocks]


def compare_finder(case: Case, times: int, seed: int) -> tuple[int, str | None]:
    """How many lookups were compared, and the first difference."""
    rnd = random.Random(f"finder-{seed}-{case.name}-{VERSION}")
    engine = Engine(case, blocks=100)
    coordinator, unit, spec_list = engine.kv_cache_manager.coordinator, engine.hash_block_size, case.specs()
    hits = rule(engine)
    sets = [(at, spec["set"], spec["partial"]) for at, spec in enumerate(msgspec.msgpack.decode(hits)["specs"])]
    cache, block = engine.pool.cached_block_hash_to_block, engine.pool.blocks[1]
    for at in range(times):
        tokens = rnd.randrange(2, 420) if rnd.random() < 0.7 else 16 * rnd.randrange(1, 27)
        named = max(0, tokens - case.ahead) // unit
        hashes = [rnd.randbytes(32) for _ in range(named)]
        (cache if isinstance(cache, dict) else cache._cache).clear()
        there: list[set[int]] = [set() for _ in case.groups]  # ends in tokens, by group
        for number, group in enumerate(case.groups):
            view = hashes
            if group.block > unit:
                view = kv_cache_utils.BlockHashListWithBlockSize(hashes, unit, group.block)
            ends = {(i + 1) * group.block: view[i] for i, bit in enumerate(fill(group, named * unit // group.block, rnd)) if bit}
            if group.block > unit and group.kind in ("full", "mamba") and VERSION >= (0, 24):
                ends |= {(j + 1) * unit: hashes[j] for j in range(named) if (j + 1) * unit % group.block and rnd.random() < 0.15}
            there[number] = set(ends)
            for digest in ends.values():
                key = bytes(digest) + number.to_bytes(4, "big")
                if isinstance(cache, dict):
                    cache[key][1] = block
                else:
                    cache.insert(key, block)
        held = [set.intersection(*(there[member] for member in members)) for _, members in spec_list]

        def has(number: int, index: int) -> bool:
            end = (index + 1) * unit
            for at, whole, partial in sets:
                spec = spec_list[at][0]
                if number == partial:
                    return end % spec.block > 0 and end in held[at]
                if number == whole and spec.kind == "full":
                    return end % spec.block == 0 and all(p in held[at] for p in range(spec.block, end + 1, spec.block))
                if number == whole:
                    return end in held[at]
            raise AssertionError(f"set {number} is no spec's")

        expected: Any = coordinator.find_longest_cache_hit(hashes, tokens - 1)[1]
        found = find_hit(hits, tokens, has)
        if found != expected:
            return at, f"seed {seed} lookup {at} of {tokens} tokens: {found}, the engine {expected}; there: {[sorted(x) for x in there]}"
    return times, None
