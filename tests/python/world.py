"""A real vLLM scheduler without a model, and a reader of the agent's sockets that checks everything it hears."""

import dataclasses
import json
import pathlib
import random
import time
from typing import Any, ClassVar

import msgspec
import torch
import zmq
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

import xxh

BLOCK = 16
SEED = 77
MODEL = "base"

_MODEL_CONFIG = {
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


def model_directory(place: pathlib.Path) -> str:
    """A model that is only a configuration: a scheduler needs no more."""
    (place / "config.json").write_text(json.dumps(_MODEL_CONFIG))
    return str(place)


def scheduler(
    model: str,
    blocks: int,
    asynchronous: bool = False,
    max_num_seqs: int = 8,
    budget: int = 256,
    lora: Any = None,
) -> Scheduler:
    """A scheduler with a pool of so many blocks."""
    scheduling = SchedulerConfig(
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        max_model_len=2048,
        enable_chunked_prefill=True,
        is_encoder_decoder=False,
        async_scheduling=asynchronous,
    )
    cache = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache.num_gpu_blocks = blocks
    config = VllmConfig(
        model_config=ModelConfig(
            model=model, served_model_name=MODEL, skip_tokenizer_init=True, max_model_len=2048, dtype="float32"
        ),
        cache_config=cache,
        scheduler_config=scheduling,
        lora_config=lora,
    )
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)])
    init_none_hash(sha256_cbor)
    return (AsyncScheduler if asynchronous else Scheduler)(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        hash_block_size=BLOCK,
        log_stats=False,
    )


hasher = get_request_block_hasher(BLOCK, sha256_cbor)


@dataclasses.dataclass
class Adapter:
    """As much of a LoRARequest as the scheduler reads."""

    lora_name: str
    lora_int_id: int
    lora_path: str = "x"
    load_inplace: bool = False

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id


def request(id: str, tokens: list[int], max_tokens: int = 40, salt: str | None = None, adapter: str = "") -> Request:
    """A request as the engine core makes it."""
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    params.update_from_generation_config({}, None)
    lora = Adapter(adapter, sum(adapter.encode())) if adapter else None
    return Request(id, tokens, params, None, block_hasher=hasher, cache_salt=salt, lora_request=lora)


def cached_keys(pool: Any) -> set[bytes]:
    """The engine's own digests of what is cached, without the group."""
    return {bytes(key)[:-4] for key in pool.cached_block_hash_to_block._cache}


class Names:
    """Engine digest -> fingerprint, from known tokens by a hashing of its own; and who follows whom."""

    def __init__(self) -> None:
        self.fingerprint: dict[bytes, int] = {}
        self.parent: dict[int, int] = {}
        self.roots: set[int] = set()

    def learn(self, request: Request) -> None:
        adapter = request.lora_request.lora_name if request.lora_request else ""
        parent = xxh.root(MODEL, adapter, request.cache_salt or "", SEED)
        self.roots.add(parent)
        for at, key in enumerate(request.block_hashes):
            known = self.fingerprint.get(bytes(key))
            if known is None:
                known = xxh.block(parent, list(request._all_token_ids[at * BLOCK : (at + 1) * BLOCK]))
                self.fingerprint[bytes(key)] = known
                self.parent[known] = parent
            parent = known

    def reachable(self, keys: set[bytes]) -> set[int]:
        """What a prompt can hit of these cached keys."""
        resident = {self.fingerprint[key] for key in keys}
        answers: dict[int, bool] = {root: True for root in self.roots}

        def reach(fp: int) -> bool:
            walk = [fp]
            while walk:
                at = walk[-1]
                parent = self.parent[at]
                if at not in resident:
                    answers[at] = False
                elif parent in answers:
                    answers[at] = answers[parent]
                else:
                    walk.append(parent)
                    continue
                walk.pop()
            return answers[fp]

        return {fp for fp in resident if reach(fp)}


class Engine:
    """Steps a scheduler as an engine core does, with random tokens for its model's output."""

    def __init__(self, scheduler: Scheduler, seed: int) -> None:
        self.scheduler = scheduler
        self.rnd = random.Random(seed)
        self.names = Names()
        self.steps = 0
        self.delivered: dict[str, int] = {}
        self.preempted = 0

        original = scheduler.kv_cache_manager.get_computed_blocks

        def looked_up(request: Request) -> Any:
            result = original(request)
            if request.request_id not in self.started:
                self.delivered[request.request_id] = result[1]
            return result

        self.started: set[str] = set()
        scheduler.kv_cache_manager.get_computed_blocks = looked_up

    def step(self) -> None:
        """One schedule, one update."""
        output = self.scheduler.schedule()
        self.started |= {new.req_id for new in output.scheduled_new_reqs}
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for id in ids:
            live = self.scheduler.requests[id]
            sampled.append([self.rnd.randrange(4000)] if live.num_computed_tokens >= live.num_tokens else [])
        result = ModelRunnerOutput(req_ids=ids, req_id_to_index={id: i for i, id in enumerate(ids)}, sampled_token_ids=sampled)
        before = list(self.scheduler.requests.values())
        self.scheduler.update_from_output(output, result)
        for live in before:
            self.names.learn(live)
        self.preempted += sum(live.num_preemptions > 0 for live in before)
        self.steps += 1

    def add(self, request: Request) -> None:
        self.names.learn(request)
        self.scheduler.add_request(request)


class Closed:
    """A prefix-closed set as a receiver keeps it."""

    def __init__(self) -> None:
        self.members: set[int] = set()
        self.parent: dict[int, int] = {}
        self.children: dict[int, int] = {}

    def store(self, parent: int, chain: list[int], root: bool) -> None:
        assert root or parent in self.members, "a child was stored before its parent"
        for fp in chain:
            assert fp not in self.members, "stored twice"
            self.members.add(fp)
            self.parent[fp] = parent
            self.children[parent] = self.children.get(parent, 0) + 1
            parent = fp

    def remove(self, chain: list[int]) -> None:
        for fp in chain:
            self.members.remove(fp)
            assert not self.children.get(fp), "a parent was removed before its child"
            self.children[self.parent.pop(fp)] -= 1


class Reader:
    """Follows an agent as an index does, with pyzmq, and checks what every receiver relies on."""

    open: ClassVar[set["Reader"]] = set()

    def __init__(self, agent: Any) -> None:
        self.context = zmq.Context()
        self.open.add(self)
        self.events = self.context.socket(zmq.SUB)
        self.events.setsockopt(zmq.SUBSCRIBE, b"kvatlas/1/")
        self.events.setsockopt(zmq.RCVHWM, 0)
        self.events.connect(agent.events.replace("0.0.0.0", "127.0.0.1"))
        self.control = self.context.socket(zmq.DEALER)
        self.control.connect(agent.control.replace("0.0.0.0", "127.0.0.1"))
        self.closed: dict[str, Closed] = {}
        self.next: int | None = None
        self.state: dict | None = None
        self.lives: list[tuple[str, dict]] = []
        self.roots: dict[int, tuple[str, str]] = {}
        self.messages = 0
        self.clears = 0
        assert self.events.poll(10_000), "no heartbeat within 10 s"
        self.snapshot()

    def close(self) -> None:
        self.open.discard(self)
        self.events.close(0)
        self.control.close(0)
        self.context.term()

    def ask(self, request: Any) -> Any:
        """One request of the control socket."""
        self.control.send_multipart([b"", msgspec.msgpack.encode(request)])
        assert self.control.poll(10_000), f"no answer to {request}"
        empty, reply = self.control.recv_multipart()
        assert empty == b""
        return msgspec.msgpack.decode(reply)

    def snapshot(self) -> None:
        """Begins anew from a snapshot."""
        self._forget()
        first = self.ask({"snapshot": {"cut": None, "piece": 0}})["snapshot"]
        pieces = [first]
        for at in range(1, first["pieces"]):
            pieces.append(self.ask({"snapshot": {"cut": first["cut"], "piece": at}})["snapshot"])
        for piece in pieces:
            for chain in piece["chains"]:
                self._store(chain)
        assert first["digests"] == [[kind, xxh.digest(self.sets.get(kind, set()))] for kind, _ in first["digests"]]
        self.next = first["next"]

    def read(self, until: Any, seconds: float = 20) -> None:
        """Applies messages until `until(self)` holds after one of them."""
        deadline = time.monotonic() + seconds
        while True:
            assert self.events.poll(max(0, (deadline - time.monotonic()) * 1000)), f"not within {seconds} s: {self.state}"
            topic, seq, payload = self.events.recv_multipart()
            self.apply(int.from_bytes(seq, "big"), msgspec.msgpack.decode(payload))
            if self.next is not None and until(self):
                return

    def apply(self, seq: int, batch: dict) -> None:
        self.messages += 1
        if self.next is None or seq < self.next:
            return  # before the snapshot
        assert seq == self.next, f"seq {seq} after {self.next - 1}"
        self.next = seq + 1
        for op in batch["o"]:
            ((kind, body),) = op.items()
            if kind == "store":
                self._store(body)
            elif kind == "remove":
                self.closed[body["k"]].remove(self._list(body))
            elif kind == "clear":
                self.clears += 1
                self._forget()
            elif kind == "state":
                self.state = body
                told = {one["kind"]: one["digest"] for one in body["digests"]}
                have = {kind: xxh.digest(self.sets.get(kind, set())) for kind in told}
                assert "gpu" in told and told == have, f"digests at seq {seq}"
            elif kind == "life":
                ((event, life),) = body.items()
                self.lives.append((event, life))
            else:
                raise AssertionError(kind)

    @property
    def sets(self) -> dict[str, set[int]]:
        """Members by kind."""
        return {kind: closed.members for kind, closed in self.closed.items()}

    @property
    def set(self) -> set[int]:
        """What is reachable on GPU."""
        return self.closed["gpu"].members

    def _forget(self) -> None:
        self.closed = {"gpu": Closed()}

    def _list(self, body: dict) -> list[int]:
        data = body["f"]
        return [int.from_bytes(data[i : i + 8], "little") for i in range(0, len(data), 8)]

    def _store(self, body: dict) -> None:
        ((kind, parent),) = body["p"].items()
        if kind == "root":
            self.roots[parent["fp"]] = (parent["model"], parent["adapter"])
            parent = parent["fp"]
        self.closed.setdefault(body["k"], Closed()).store(parent, self._list(body), kind == "root")
