"""Breaks each thing that the plugin wraps, in turn, in a process of its own, and looks at what the engine then does.

Run with any vLLM from 0.10.2 on the path: ``python tests/python/breakage.py``. vLLM is loaded once, without the plugin;
each scenario is a fork of that process. One line of JSON a scenario; the last line says how many there were.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import logging
import os
import pathlib
import random
import sys
import tempfile
import traceback
from typing import Any

os.environ.update(
    KVATLAS_BIND="tcp://127.0.0.1:0",
    KVATLAS_CONTROL="tcp://127.0.0.1:0",
    KVATLAS_ENGINE="broken",
    KVATLAS_SEED="7",
    HF_HUB_OFFLINE="1",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_PLUGINS="none",
)

import torch

for gone in ("_is_avx512_supported", "_is_avx2_supported", "_is_amx_tile_supported"):
    if not hasattr(torch._C._cpu, gone):  # older vLLM on a newer torch
        setattr(torch._C._cpu, gone, lambda: False)

import vllm
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

try:
    from vllm.utils.hashing import sha256_cbor
except ImportError:
    from vllm.utils import sha256_cbor

from kvatlas import facts, plugin

BLOCKS = 60
_MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 8192,
    "vocab_size": 4096,
    "torch_dtype": "float32",
}


def make(cls: Any, **arguments: Any) -> Any:
    """Without the arguments that this version does not know; what it asks for beyond them is None."""
    known = inspect.signature(cls).parameters
    wanted = {
        name: None
        for name, parameter in known.items()
        if parameter.default is inspect.Parameter.empty and parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
    }
    return cls(**{**wanted, **{name: value for name, value in arguments.items() if name in known}})


def config(model: str) -> Any:
    scheduling = make(
        SchedulerConfig,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        max_model_len=2048,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=False,
    )
    cache = CacheConfig(block_size=16, enable_prefix_caching=True)
    cache.num_gpu_blocks = BLOCKS
    named = make(
        ModelConfig, model=model, served_model_name="base", skip_tokenizer_init=True, max_model_len=2048, dtype="float32"
    )
    return VllmConfig(model_config=named, cache_config=cache, scheduler_config=scheduling)


def scheduler(cls: type = Scheduler) -> Any:
    """A scheduler of this vLLM with full attention."""
    spec = make(FullAttentionSpec, block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32, use_mla=False)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    pool = {"num_blocks": BLOCKS, "kv_cache_tensors": [], "kv_cache_groups": groups}
    kv = KVCacheConfig(**{name: value for name, value in pool.items() if name in KVCacheConfig.__dataclass_fields__})
    arguments = dict(vllm_config=CONFIG, kv_cache_config=kv, structured_output_manager=StructuredOutputManager(CONFIG))
    known = inspect.signature(cls.__init__).parameters
    further = {name: 16 for name in ("block_size", "hash_block_size") if name in known}
    return cls(**arguments, **further, log_stats=False)


def request(id: str, tokens: list[int], lora: str = "", **sampling: Any) -> Any:
    params = SamplingParams(max_tokens=20, ignore_eos=True, **sampling)
    params.update_from_generation_config({}, None)
    adapter = LoRARequest(lora, 3, "/adapters/" + lora) if lora else None
    return make(
        Request,
        request_id=id,
        prompt_token_ids=list(tokens),
        sampling_params=params,
        block_hasher=HASHER,
        lora_request=adapter,
        client_index=0,
        arrival_time=None,
        priority=0,
    )


def step(made: Any, rnd: random.Random) -> Any:
    """One step of an engine whose model answers at random."""
    output = made.schedule()
    ids = list(output.num_scheduled_tokens)
    live = [made.requests[id] for id in ids]
    sampled = [[rnd.randrange(4000)] if one.num_computed_tokens >= one.num_tokens else [] for one in live]
    result = {
        "req_ids": ids,
        "req_id_to_index": {id: at for at, id in enumerate(ids)},
        "sampled_token_ids": sampled,
        "logprobs": None,
        "prompt_logprobs_dict": {},
        "pooler_output": [],
    }
    fields = {field.name for field in dataclasses.fields(ModelRunnerOutput)}
    made.update_from_output(output, ModelRunnerOutput(**{name: what for name, what in result.items() if name in fields}))
    return output


def work(made: Any, steps: int = 120) -> list[Any]:
    """What an engine does with random work: each step's counts, what was taken from cache, the keys at the end."""
    rnd = random.Random(5)
    roots = [[rnd.randrange(4000) for _ in range(300)] for _ in range(3)]
    did: list[Any] = []
    number = 0
    pool = made.kv_cache_manager.block_pool
    for turn in range(steps):
        if len(made.requests) < 10 and rnd.random() < 0.5:
            tokens = rnd.choice(roots)[: rnd.randrange(1, 300)] + [rnd.randrange(4000) for _ in range(rnd.randrange(20))]
            made.add_request(request(f"r{number}", tokens, lora="ad" if rnd.random() < 0.3 else ""))
            number += 1
        if turn % 30 == 17 and hasattr(pool, "evict_blocks"):
            pool.evict_blocks({rnd.randrange(1, BLOCKS) for _ in range(5)})
        if turn % 50 == 49:
            from vllm.v1.request import RequestStatus

            made.finish_requests(list(made.requests), RequestStatus.FINISHED_ABORTED)
            did.append(made.reset_prefix_cache())
        output = step(made, rnd)
        did.append([(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs])
        did.append([*made.get_request_counts(), round(made.kv_cache_manager.usage, 6)])
    keys = pool.cached_block_hash_to_block
    did.append(sorted(repr(key) for key in (keys if isinstance(keys, dict) else keys._cache)))
    return did


class Lines(logging.Handler):
    """What the plugin logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())

    def __contains__(self, part: str) -> bool:
        return any(part in line for line in self.lines)


def logged() -> Lines:
    lines = Lines()
    plugin.log.addHandler(lines)
    plugin._export = lambda agent, config: None  # there is no tokenizer to export
    return lines


class Recorder:
    """In the agent's place: what is told, in order."""

    engine, events, control = "broken.0", "", ""
    made: list[Recorder] = []

    def __init__(self) -> None:
        self.told: list[tuple[str, Any]] = []
        self.made.append(self)

    @staticmethod
    def start(**facts: Any) -> Recorder:
        one = Recorder()
        one.facts = facts
        return one

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)

        def told(*args: Any) -> None:
            first = args[0] if args else None
            self.told.append((name, getattr(first, "request_id", first)))

        return told

    def count(self, name: str) -> int:
        return sum(one == name for one, _ in self.told)


def hidden(cls: type, name: str) -> None:
    """Takes a method's name from its class; those who call it on an instance still find it."""
    method = getattr(cls, name)
    inner = getattr(cls, "__getattr__", None)
    for one in cls.__mro__:  # an abstract one too
        if name in vars(one):
            delattr(one, name)

    def missing(self: Any, wanted: str) -> Any:
        if wanted == name:
            return functools.partial(method, self)
        if inner is not None:
            return inner(self, wanted)
        raise AttributeError(wanted)

    cls.__getattr__ = missing


# --- scenarios: each in a fork of its own -----------------------------------------------------------------------------


def nothing_is_broken() -> None:
    lines = logged()
    plugin.register()
    plugin.register()  # harmless
    made = scheduler()
    assert made._kvatlas is not None, lines.lines
    assert work(made) == PLAIN, "the engine works differently"
    assert not [line for line in lines.lines if "failed" in line or "unknown" in line], lines.lines
    found = plugin.found()
    assert found["off"] == found["less"] == [], found
    rules = facts.rules(made)
    assert rules is not None and rules["version"] == parsed(), (rules, facts.doubt(made))
    made._kvatlas.stop()


def parsed() -> tuple[int, ...]:
    return tuple(int(part) for part in vllm.__version__.split("+")[0].split("."))


def every_request_is_told_once() -> None:
    lines = logged()
    recorded()
    plugin.register()
    made = scheduler()
    assert work(made) == PLAIN
    lives(Recorder.made[0], lines)


def recorded() -> None:
    Recorder.made.clear()
    plugin.Agent = Recorder
    for hook, tell in [("hook_cached", "cached"), ("hook_handed_out", "handed_out")]:

        def record(pool: Any, result: Any, args: Any, kwargs: Any, tell: str = tell) -> None:
            agent = getattr(pool, "_kvatlas", None)
            if agent is not None:
                getattr(agent, tell)(None)

        setattr(plugin, hook, record)


def lives(agent: Recorder, lines: Lines) -> None:
    by: dict[str, list[str]] = {}
    for name, what in agent.told:
        by.setdefault(name, []).append(what)
    arrived = by["arrived"]
    assert len(arrived) > 30 and len(set(arrived)) == len(arrived), "each request arrives once"
    assert len(set(by["finished"])) == len(by["finished"]) > 25 and set(by["finished"]) <= set(arrived)
    assert set(by["looked_up"]) <= set(arrived) and len(by["looked_up"]) >= len(by["finished"])
    assert len(by["scheduled"]) == 120 and agent.count("step") == 240, "two tells a step"
    assert agent.count("cleared") == sum(one is True for one in PLAIN)
    assert agent.count("cached") > 50 and agent.count("handed_out") > 50
    assert agent.count("evicted") == (4 if hasattr(BlockPool, "evict_blocks") else 0)
    assert agent.count("fault") == 0, lines.lines


def a_needed_name_is_missing(cls: type, name: str) -> None:
    lines = logged()
    hidden(cls, name)
    plugin.register()
    made = scheduler()
    assert getattr(made, "_kvatlas", None) is None
    assert f"{cls.__name__}.{name} is missing" in lines and "source: native" in lines, lines.lines
    assert work(made) == PLAIN


def a_less_needed_name_is_missing(cls: type, name: str) -> None:
    lines = logged()
    recorded()
    hidden(cls, name)
    plugin.register()
    made = scheduler()
    assert f"{cls.__name__}.{name} is missing" in lines, lines.lines
    assert work(made) == PLAIN
    agent = Recorder.made[0]
    assert agent.count("fault") == 0 and agent.count("cached") > 50, lines.lines
    assert agent.count("step") > 0 and agent.count("finished") > 25


def both_halves_of_a_step_are_missing() -> None:
    lines = logged()
    hidden(Scheduler, "schedule")
    hidden(Scheduler, "update_from_output")
    plugin.register()
    made = scheduler()
    assert "Scheduler.schedule and Scheduler.update_from_output are missing" in lines, lines.lines
    assert getattr(made, "_kvatlas", None) is None and work(made) == PLAIN


def a_parameter_has_another_name() -> None:
    lines = logged()
    original = BlockPool.get_new_blocks
    BlockPool.get_new_blocks = lambda self, how_many: original(self, how_many)
    plugin.register()
    made = scheduler()
    assert "BlockPool.get_new_blocks has no num_blocks" in lines, lines.lines
    assert getattr(made, "_kvatlas", None) is None and work(made) == PLAIN


def a_new_parameter(used: bool) -> None:
    """As block_mask once came: it may decide which blocks get a key."""
    lines = logged()
    original = BlockPool.cache_full_blocks

    @functools.wraps(original)
    def newer(self: Any, *args: Any, sparse: Any = None, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    known = inspect.signature(original)
    sparse = inspect.Parameter("sparse", inspect.Parameter.KEYWORD_ONLY, default=None)
    newer.__signature__ = known.replace(parameters=[*known.parameters.values(), sparse])
    BlockPool.cache_full_blocks = newer
    plugin.register()
    assert "has parameters unknown here: sparse" in lines, lines.lines
    if used:
        wrapped = BlockPool.cache_full_blocks
        BlockPool.cache_full_blocks = lambda self, *args, **kwargs: wrapped(self, *args, sparse=[1], **kwargs)
    made = scheduler()
    agent = made._kvatlas
    assert agent is not None and work(made) == PLAIN
    off = made.kv_cache_manager.block_pool._kvatlas is None
    assert off == used and ("failed 20 times" in lines) == used and ("source: native" in lines) == used, lines.lines
    assert not used or agent.events == "", "it still listens"
    agent.stop()


def a_lookup_answers_something_else() -> None:
    lines = logged()
    original = KVCacheManager.get_computed_blocks
    plugin.register()
    wrapped = KVCacheManager.get_computed_blocks
    assert wrapped.__wrapped__ is original
    inner = plugin._looked_up

    def odd(manager: Any, result: Any, args: Any, kwargs: Any) -> None:
        inner(manager, {"tokens": result[1]}, args, kwargs)

    KVCacheManager.get_computed_blocks = original
    plugin._wrap(KVCacheManager, "get_computed_blocks", odd)
    made = scheduler()
    assert work(made) == PLAIN
    assert "its hook of get_computed_blocks failed" in lines, lines.lines
    made._kvatlas.stop()


def a_scheduler_of_ones_own() -> None:
    lines = logged()
    recorded()
    plugin.register()

    class Own(Scheduler):
        def add_request(self, request: Any) -> Any:  # calls what it overrides
            return super().add_request(request)

        def schedule(self, *args: Any, **kwargs: Any) -> Any:  # does the same on its own
            return Scheduler.schedule.__wrapped__(self, *args, **kwargs)

        def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
            return Scheduler._free_request.__wrapped__(self, request, *args, **kwargs)

    made = scheduler(Own)
    assert work(made) == PLAIN
    lives(Recorder.made[0], lines)


def no_scheduler_of_vllm() -> None:
    lines = logged()
    plugin.register()
    made = scheduler()
    made._kvatlas.stop()
    manager = made.kv_cache_manager
    del manager._kvatlas, manager.block_pool._kvatlas, made._kvatlas  # as if Scheduler.__init__ had never run
    work(made)
    assert len([line for line in lines.lines if "this scheduler is none of vLLM's" in line]) == 1, lines.lines


def adapters_and_events() -> None:
    """vLLM 0.10.2 and 0.11.0 end at the first request with an adapter when they publish events."""
    broken = parsed() <= (0, 11, 0)
    made = scheduler()
    made.kv_cache_manager.block_pool.enable_kv_cache_events = True
    try:
        work(made)
        assert not broken, "this vLLM was thought to be broken"
    except AttributeError as error:
        assert broken and "id" in str(error), error
    logged()
    plugin.register()
    made = scheduler()
    made.kv_cache_manager.block_pool.enable_kv_cache_events = True
    assert work(made) == PLAIN
    assert hasattr(LoRARequest, "id") == broken
    made._kvatlas.stop()


def prompt_logprobs_read_no_cache() -> None:
    plugin.register()
    made = scheduler()
    manager = made.kv_cache_manager
    assert not facts.bypassed(manager, request("a", [1] * 40))
    asks = request("b", [1] * 40, prompt_logprobs=1)
    assert facts.bypassed(manager, asks)
    assert manager.get_computed_blocks(asks)[1] == 0
    made._kvatlas.stop()


class Executor:
    """As much of an executor as an engine core asks for that sleeps and wakes."""

    is_sleeping = False

    def sleep(self, level: int) -> None:
        self.is_sleeping = True

    def wake_up(self, tags: Any = None) -> None:
        self.is_sleeping = False

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def c18_it_sleeps_and_wakes() -> None:
    from vllm.v1.engine.core import EngineCore

    logged()
    recorded()
    plugin.register()
    core = EngineCore.__new__(EngineCore)
    core.scheduler = scheduler()
    core.batch_queue = None
    core.model_executor = Executor()
    core.vllm_config = CONFIG
    core.mm_receiver_cache = core.mm_input_cache_server = core._idle_state_callbacks = None
    core.reset_mm_cache = core.reset_encoder_cache = lambda: None
    agent = Recorder.made[0]
    agent.told.clear()
    core.sleep(1)
    states = [one for one in agent.told if one[0] in ("asleep", "draining")]
    assert ("asleep", True) in states, agent.told
    assert (agent.count("cleared") == 1) == hasattr(EngineCore, "pause_scheduler")
    agent.told.clear()
    core.wake_up()
    assert [one for one in agent.told if one[0] in ("asleep", "draining")][-2:] == [("asleep", False), ("draining", False)]
    if hasattr(core, "pause_scheduler"):
        core.pause_scheduler(mode="keep", clear_cache=False)
        assert agent.told[-2:] == [("asleep", False), ("draining", True)], agent.told
        core.resume_scheduler()
        assert agent.told[-1] == ("draining", False)


def a_manager_takes_keys_by_itself() -> None:
    """As the manager of Mamba states does from 0.32 on."""
    logged()
    recorded()
    plugin.register()
    made = scheduler()
    pool = made.kv_cache_manager.block_pool
    made.add_request(request("a", list(range(100))))
    step(made, random.Random(1))
    cached = [block for block in pool.blocks if block.block_hash is not None]

    class Manager:
        block_pool = pool

        def drop(self, block: Any) -> Any:
            return self.block_pool._maybe_evict_cached_block(block), 1 / block.block_id

    Manager.drop = plugin._watched(Manager.drop)
    assert Manager().drop(cached[0]) == (True, 1 / cached[0].block_id) and cached[0].block_hash is None
    assert Recorder.made[0].told[-1] == ("evicted", [cached[0].block_id])
    try:
        Manager().drop(pool.null_block)
        raise AssertionError("its exception is gone")
    except ZeroDivisionError:
        pass
    assert plugin._EVICT not in vars(pool)
    pool._kvatlas.told.clear()
    pool.get_new_blocks(BLOCKS - 1 - len(cached) - 1)
    assert pool._kvatlas.told == [("handed_out", None)], "not once for each block"
    mamba = sys.modules["vllm.v1.core.single_type_kv_cache_manager"].MambaManager
    watched = getattr(getattr(mamba, "_cache_partial_tail_block", None), "_kvatlas", False)
    assert watched == (parsed() >= (0, 32, 0))


def every_way_to_change_a_key_is_known() -> None:
    """Who gives or takes keys, by the names that the code of vLLM's core uses. A new one must be read, and hooked."""
    import dis

    from vllm.v1.core import kv_cache_coordinator, kv_cache_manager, single_type_kv_cache_manager
    from vllm.v1.core.sched import scheduler as sched

    plugin.register()
    changing = {"_insert_block_hash", "_remove_cached_block_hashes", plugin._EVICT, "set_block_hash", "reset_hash"}
    inside, outside = set(), []
    modules = [kv_cache_coordinator, kv_cache_manager, single_type_kv_cache_manager, sched, sys.modules[BlockPool.__module__]]
    for module in modules:
        for cls in [one for one in vars(module).values() if isinstance(one, type) and one.__module__ == module.__name__]:
            for name, member in vars(cls).items():
                function = getattr(member, "__func__", member)
                original = inspect.unwrap(function) if callable(function) else function
                if not hasattr(original, "__code__"):
                    continue
                ops = list(dis.get_instructions(original.__code__))
                stores = any(op.opname == "STORE_ATTR" and op.argval == "block_hash" for op in ops)
                if stores or changing & set(original.__code__.co_names):
                    if cls is BlockPool:
                        inside.add(name)
                    elif not getattr(function, "_kvatlas", False):
                        outside.append(f"{cls.__name__}.{name}")
    hooked = {"cache_full_blocks", "cache_partial_block", "move_block_hashes", "get_new_blocks", "evict_blocks"}
    helpers = {"_insert_block_hash", "_remove_cached_block_hashes", plugin._EVICT}
    assert inside <= hooked | {"reset_prefix_cache"} | helpers, inside
    assert outside == [], outside


SCENARIOS: list[tuple[Any, ...]] = [
    (nothing_is_broken,),
    (every_request_is_told_once,),
    *((a_needed_name_is_missing, BlockPool, name) for name in ("cache_full_blocks", "get_new_blocks", "reset_prefix_cache")),
    *((a_less_needed_name_is_missing, {"Scheduler": Scheduler, "KVCacheManager": KVCacheManager}[cls], name) for cls, name in plugin._LESS),
    (both_halves_of_a_step_are_missing,),
    (a_parameter_has_another_name,),
    (a_new_parameter, False),
    (a_new_parameter, True),
    (a_lookup_answers_something_else,),
    (a_scheduler_of_ones_own,),
    (no_scheduler_of_vllm,),
    (adapters_and_events,),
    (prompt_logprobs_read_no_cache,),
    (c18_it_sleeps_and_wakes,),
    (a_manager_takes_keys_by_itself,),
    (every_way_to_change_a_key_is_known,),
]


def run(scenario: tuple[Any, ...]) -> dict[str, Any]:
    """In a child, so that what it breaks is broken there alone."""
    name = "_".join([scenario[0].__name__, *(getattr(part, "__name__", str(part)) for part in scenario[1:])])
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            scenario[0](*scenario[1:])
            told = ""
        except BaseException:
            told = traceback.format_exc()[-1500:]
        os.write(here, told.encode()[-60_000:])
        os._exit(0)
    os.close(here)
    with os.fdopen(there, "rb") as pipe:
        told = pipe.read().decode()
    _, status = os.waitpid(child, 0)
    return {"scenario": name, "ok": told == "" and status == 0, "why": told}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        (pathlib.Path(place) / "config.json").write_text(json.dumps(_MODEL))
        CONFIG = config(place)
        kv_cache_utils.init_none_hash(sha256_cbor)
        HASHER = kv_cache_utils.get_request_block_hasher(16, sha256_cbor)
        torch.set_num_threads(1)
        PLAIN = work(scheduler())
        wanted = sys.argv[1] if len(sys.argv) > 1 else ""
        results = [run(one) for one in SCENARIOS if wanted in one[0].__name__]
    for result in results:
        print(json.dumps(result), flush=True)
    print(json.dumps({"vllm": vllm.__version__, "scenarios": len(results), "failed": sum(not r["ok"] for r in results)}))
    sys.exit(any(not result["ok"] for result in results))
