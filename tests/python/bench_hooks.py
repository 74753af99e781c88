"""What the hooks cost the engine's thread, on a real BlockPool: microseconds for each new block.

    python tests/python/bench_hooks.py            # needs vLLM and the agent's wheel, built with --release

Two ways of looking. `inside`: the time spent in the hooks themselves, by a clock around each (less the clock's own
cost); of all calls the median and the least tenth, since a call during which the machine did something else says
nothing. `manager`: the cache manager's own work plain, with the hooks, and with vLLM's own events instead, in alternating
rounds of one process; on a noisy machine the differences are rough. Not part of any test: numbers are for reading.
"""

import argparse
import os
import statistics
import time

os.environ.update(KVATLAS_BIND="tcp://127.0.0.1:0", KVATLAS_CONTROL="tcp://127.0.0.1:0", VLLM_LOGGING_LEVEL="ERROR", KVATLAS_LOG="error")

import torch  # noqa: E402
from vllm.utils.hashing import sha256_cbor  # noqa: E402
from vllm.v1.core.kv_cache_manager import KVCacheManager  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec  # noqa: E402
from vllm.v1.request import Request  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402

from kvatlas import _agent, plugin  # noqa: E402
from kvatlas._agent import Agent  # noqa: E402

BLOCK, BLOCKS = 16, 4001
clock = time.perf_counter_ns


def manager(events: bool = False) -> KVCacheManager:
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    config = KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["l"], spec)])
    return KVCacheManager(config, max_model_len=65536, scheduler_block_size=BLOCK, hash_block_size=BLOCK, enable_caching=True, enable_kv_cache_events=events)


def attach(kvm: KVCacheManager) -> Agent:
    spec = {"kind": "full", "block": BLOCK, "span": 0, "eagle": False, "groups": [0]}
    rules = {"unit": BLOCK, "align": BLOCK, "ahead": 0, "version": (0, 32, 0), "fine": False, "specs": [spec]}
    agent = Agent.start(kvm.block_pool, ["m"], BLOCK, BLOCKS, [("full_attention", BLOCK, 0)], rules=rules)
    kvm._kvatlas = kvm.block_pool._kvatlas = agent
    return agent


def request(name: str, start: int, count: int) -> Request:
    return Request(name, [(start * 7919 + i) % 150_000 for i in range(count)], SamplingParams(max_tokens=4), None, block_hasher=hasher)


class Inside:
    """Times of hooks, a new block each, by hook."""

    def __init__(self) -> None:
        self.times: dict[str, list[float]] = {}
        laps = [clock() for _ in range(10_001)]
        self.own = statistics.median(b - a for a, b in zip(laps, laps[1:]))

    def around(self, name: str, hook, blocks):
        times = self.times.setdefault(name, [])

        def timed(owner, result, args, kwargs):
            start = clock()
            hook(owner, result, args, kwargs)
            spent = clock() - start - self.own
            if count := blocks(result, kwargs):
                times.append(spent / count / 1000)

        return timed


def prefill(kvm: KVCacheManager, agent: Agent | None, turns: int, tokens: int) -> tuple[int, float]:
    """Prompts without a hit, each cached in chunks of 512 tokens. New blocks and the manager's seconds."""
    spent = blocks = 0
    for turn in range(turns):
        one = request(f"p{turn}", turn * 13 + id(kvm) % 1000, tokens)
        if agent is not None:
            agent.arrived(one)
        start = clock()
        for at in range(0, tokens, 512):
            kvm.allocate_slots(one, min(512, tokens - at))
            kvm.take_events()
            one.num_computed_tokens = min(at + 512, tokens)
        spent += clock() - start
        blocks += tokens // BLOCK
        kvm.free(one)
        if agent is not None:
            agent.finished(one.request_id, "stop")
    return blocks, spent


def decode(kvm: KVCacheManager, agent: Agent | None, turns: int, batch: int) -> tuple[int, float]:
    """A batch of requests that generate token by token: one new block in 16 tokens."""
    spent = blocks = 0
    live = []
    for at in range(batch):
        one = request(f"d{at}", at + id(kvm) % 1000, 64 + at % BLOCK)
        if agent is not None:
            agent.arrived(one)
        kvm.allocate_slots(one, one.num_tokens)
        one.num_computed_tokens = one.num_tokens
        live.append(one)
    for turn in range(turns):
        for one in live:
            one.append_output_token_ids(turn)
            start = clock()
            kvm.allocate_slots(one, 1)
            spent += clock() - start
            one.num_computed_tokens += 1
            blocks += one.num_computed_tokens % BLOCK == 0
        start = clock()
        kvm.take_events()
        spent += clock() - start
    for one in live:
        kvm.free(one)
        if agent is not None:
            agent.finished(one.request_id, "stop")
    return blocks, spent


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    plugin.register()
    inside = Inside()
    from vllm.v1.core.block_pool import BlockPool

    plain, hooked, timed, stock = manager(), manager(), manager(), manager(events=True)
    agents = [attach(hooked), attach(timed)]
    works = {
        "prefill, 512 tokens a call": lambda kvm, agent: prefill(kvm, agent, 20, 8192),
        "decode, batch of 64": lambda kvm, agent: decode(kvm, agent, 320, 64),
    }
    for name, work in works.items():
        shares: dict[str, list[float]] = {"plain": [], "hooked": [], "vLLM's events": []}
        for _ in range(args.rounds):
            for which, kvm, agent in (("plain", plain, None), ("hooked", hooked, agents[0]), ("vLLM's events", stock, None)):
                blocks, spent = work(kvm, agent)
                shares[which].append(spent / blocks / 1000)
        inside.times.clear()
        wrapped = {method: getattr(BlockPool, method) for method in ("cache_full_blocks", "get_new_blocks")}
        for method, hook, count in (
            ("cache_full_blocks", _agent.hook_cached, lambda _, kwargs: kwargs["num_full_blocks"] - kwargs["num_cached_blocks"]),
            ("get_new_blocks", _agent.hook_handed_out, lambda result, _: len(result)),
        ):
            setattr(BlockPool, method, wrapped[method].__wrapped__)
            plugin._wrap(BlockPool, method, inside.around(method, hook, count))
        for _ in range(3):
            work(timed, agents[1])
        for method, original in wrapped.items():
            setattr(BlockPool, method, original)
        print(f"{name}: us a new block")
        both = [0.0, 0.0]
        for method, times in inside.times.items():
            tenth, median = statistics.quantiles(times, n=10)[0], statistics.median(times)
            both = [both[0] + tenth, both[1] + median]
            print(f"  inside {method:18} tenth {tenth:6.3f}  median {median:6.3f}   ({len(times)} calls)")
        print(f"  inside, both              tenth {both[0]:6.3f}  median {both[1]:6.3f}")
        for which, values in shares.items():
            print(f"  manager, {which:13} least {min(values):6.2f}  median {statistics.median(values):6.2f}")
        least = {which: min(values) for which, values in shares.items()}
        events = least["vLLM's events"] - least["plain"]
        print(f"  added by vLLM's own events {events:6.2f}: {events / max(both[1], 0.001):.0f} times the hooks' median")
    one = request("a", 1, 8192)
    times = []
    for _ in range(50):
        start = clock()
        agents[1].arrived(one)
        times.append((clock() - start) / 512 / 1000)
        agents[1].finished("a", "stop")
    print(f"naming a prompt when it arrives: {min(times):.3f} us a block (512 blocks, least of 50)")
    for agent in agents:
        agent.stop()


init_none_hash(sha256_cbor)
hasher = get_request_block_hasher(BLOCK, sha256_cbor)
if __name__ == "__main__":
    main()
