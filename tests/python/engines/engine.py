"""The real KVCacheManager of whatever vLLM is on the path, in something that looks like its scheduler to the agent.

No model and no config of vLLM's: a manager needs neither. Signatures differ between versions, so arguments that one
does not know are left out.
"""

import dataclasses
import inspect
import math
from types import SimpleNamespace
from typing import Any

import torch
import vllm
import vllm.v1.kv_cache_interface as interface
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

try:
    from vllm.utils.hashing import sha256_cbor
except ImportError:
    from vllm.utils import sha256_cbor

VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split(".")[:3])
EAGLE_GROUPS = "is_eagle_group" in inspect.signature(interface.KVCacheGroupSpec.__init__).parameters
MODEL = "base"
MAX_LEN = 4096


@dataclasses.dataclass(frozen=True)
class Group:
    """One KV cache group of a model: full | window | chunk | mamba."""

    kind: str
    block: int = 16
    span: int = 0
    mode: str = "none"
    heads: int = 1
    eagle: bool = False

    def spec(self) -> Any:
        common = dict(block_size=self.block, num_kv_heads=1, head_size=self.heads, dtype=torch.float32, use_mla=False)
        if self.kind == "full":
            return _make(interface.FullAttentionSpec, **common)
        if self.kind == "window":
            return _make(interface.SlidingWindowSpec, sliding_window=self.span, **common)
        if self.kind == "chunk":
            return _make(interface.ChunkedLocalAttentionSpec, attention_chunk_size=self.span, **common)
        shape = dict(block_size=self.block, shapes=((1, 1),), dtypes=(torch.float32,))
        return _make(interface.MambaSpec, mamba_cache_mode=self.mode, num_speculative_blocks=0, **shape)


@dataclasses.dataclass(frozen=True)
class Case:
    """A model's groups and how the engine runs it. `unit` 0: the greatest common divisor of the block sizes."""

    name: str
    groups: tuple[Group, ...]
    eagle: bool = False
    unit: int = 0
    ahead: int = 0

    @property
    def hash_block(self) -> int:
        return self.unit or math.gcd(*(group.block for group in self.groups))

    @property
    def align_mode(self) -> bool:
        return any(group.kind == "mamba" and group.mode == "align" for group in self.groups)

    def specs(self) -> list[tuple[Group, list[int]]]:
        """Groups that the coordinator looks up together, full attention first."""
        merged: dict[tuple, tuple[Group, list[int]]] = {}
        for at, group in enumerate(self.groups):
            key = (group.kind, group.block, group.span, group.mode, group.heads)
            merged.setdefault(key, (group, []))[1].append(at)
        return sorted(merged.values(), key=lambda spec: spec[0].kind != "full")


def _make(cls: Any, **arguments: Any) -> Any:
    known = inspect.signature(cls.__init__).parameters
    return cls(**{name: value for name, value in arguments.items() if name in known})


def start() -> None:
    """Once a process."""
    kv_cache_utils.init_none_hash(sha256_cbor)


class Engine:
    """A manager with the attributes of its scheduler that the agent and the chunk splitter read."""

    def __init__(self, case: Case, blocks: int) -> None:
        self.case = case
        groups = []
        for at, group in enumerate(case.groups):
            flag = {"is_eagle_group": True} if group.eagle else {}
            groups.append(interface.KVCacheGroupSpec(layer_names=[f"layer.{at}"], kv_cache_spec=group.spec(), **flag))
        sizes = [group.block for group in case.groups]
        self.block_size = math.lcm(*sizes)
        self.hash_block_size = case.hash_block
        self.kv_cache_config = _make(
            interface.KVCacheConfig, num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups
        )
        # From 0.30 on the scheduler says whether EAGLE drops a block; with look-ahead hashing none does.
        self.use_eagle = case.eagle
        self.use_eagle_block_drop = case.eagle and not case.ahead
        self.num_hash_lookahead_tokens = case.ahead
        self.kv_cache_manager = _make(
            KVCacheManager,
            kv_cache_config=self.kv_cache_config,
            max_model_len=MAX_LEN,
            scheduler_block_size=self.block_size,
            hash_block_size=self.hash_block_size,
            enable_caching=True,
            use_eagle=self.use_eagle_block_drop,
            num_hash_lookahead_tokens=case.ahead,
        )
        mamba = [group.block for group in case.groups if group.kind == "mamba"]
        self.cache_config = SimpleNamespace(block_size=max(mamba or sizes), mamba_cache_mode="align")
        self.scheduler_config = SimpleNamespace(max_num_seqs=16, long_prefill_token_threshold=0)
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(served_model_name=MODEL, model=MODEL),
            parallel_config=SimpleNamespace(data_parallel_rank=0, data_parallel_size=1),
            scheduler_config=self.scheduler_config,
            cache_config=self.cache_config,
            lora_config=None,
            speculative_config=None,
            kv_transfer_config=None,
            kv_events_config=None,
        )
        self.max_num_scheduled_tokens = 1 << 14
        self.mamba_has_prefill_checkpoint_blocks = False
        self.mamba_prefill_checkpoint_alignment = None
        self.mamba_partial_cache_hit = (
            case.align_mode
            and self.hash_block_size < self.block_size
            and getattr(self.kv_cache_manager.coordinator, "enable_partial_hash_hits", False)
        )
        self.mamba_shared_prefix_checkpoint = self.mamba_partial_cache_hit and getattr(
            self.kv_cache_manager, "mamba_shared_prefix_checkpoint", False
        )
        self.connector = None
        self.requests: dict[str, Request] = {}
        self.running: list[Request] = []
        self.waiting: list[Request] = []
        ahead = {"num_hash_lookahead_tokens": case.ahead} if case.ahead else {}
        self._hasher = kv_cache_utils.get_request_block_hasher(self.hash_block_size, sha256_cbor, **ahead)

    @property
    def pool(self) -> Any:
        return self.kv_cache_manager.block_pool

    def get_request_counts(self) -> tuple[int, int]:
        return len(self.running), len(self.waiting)

    def request(self, id: str, tokens: list[int], salt: str | None, adapter: str) -> Request:
        lora = LoRARequest(adapter, sum(adapter.encode()), "/adapters/" + adapter) if adapter else None
        nothing = dict.fromkeys(
            ("pooling_params", "multi_modal_kwargs", "multi_modal_hashes", "multi_modal_placeholders", "mm_features")
            + ("mm_kwargs", "mm_hashes", "mm_positions", "eos_token_id")
        )
        return _make(
            Request,
            request_id=id,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=256),
            block_hasher=self._hasher,
            cache_salt=salt,
            lora_request=lora,
            **nothing,
        )

    def split(self, request: Request, tokens: int, hit: int) -> int:
        """How many of so many new tokens a step may compute: the scheduler's own rule for Mamba states."""
        if not self.case.align_mode:
            return tokens
        return Scheduler._mamba_block_aligned_split(self, request, tokens, hit, 0)

    def step_starts(self) -> None:
        if hasattr(self.kv_cache_manager, "new_step_starts"):
            self.kv_cache_manager.new_step_starts()

    def step_ends(self) -> int:
        """What the scheduler does once a step; returns the number of copied blocks."""
        manager = self.kv_cache_manager
        if hasattr(manager, "take_new_block_ids"):
            manager.take_new_block_ids()
        if hasattr(manager, "take_kv_cache_block_copies"):
            copies, retained = manager.take_kv_cache_block_copies()
            self.pool.free_blocks(retained)  # the worker has copied
            return len(copies)
        pairs = [pair for one in manager.coordinator.single_type_managers for pair in getattr(one, "_pending_cow_copies", ())]
        if pairs:
            for one in manager.coordinator.single_type_managers:
                one.take_pending_cow_copies()
            for pair in pairs:
                self.pool.free_blocks(pair)
        return len(pairs)
