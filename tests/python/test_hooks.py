"""What the plugin finds in this vLLM, and what it does when it does not find it; and how this vLLM's hits end."""

import ast
import json
import math
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
import vllm
from kvatlas import facts
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
    SlidingWindowSpec,
)

HERE = pathlib.Path(__file__).resolve().parent
VERSION = tuple(int(part) for part in vllm.__version__.split("+")[0].split("."))


def test_whatever_is_broken_the_engine_works_as_before():
    """Each scenario of breakage.py, in one process without the plugin: see there."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("KVATLAS_")}
    done = subprocess.run(
        [sys.executable, str(HERE / "breakage.py")], capture_output=True, text=True, timeout=900, env=environment
    )
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert results and results[-1].get("scenarios", 0) > 20, done.stderr[-3000:]
    broken = [f"{result['scenario']}: {result['why']}" for result in results[:-1] if not result["ok"]]
    assert broken == [] and done.returncode == 0


@pytest.mark.parametrize("path", sorted(pathlib.Path(facts.__file__).parent.glob("*.py")), ids=lambda path: path.name)
def test_it_is_written_for_python_3_9(path):
    """vLLM 0.10.2 to 0.11 run on it: syntax, and annotations that it cannot evaluate."""
    tree = ast.parse(path.read_text(), feature_version=(3, 9))
    unions = [node for node in ast.walk(tree) if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr)]
    lazy = any(isinstance(node, ast.ImportFrom) and node.module == "__future__" for node in tree.body)
    assert lazy or not unions


def full(block=16, heads=1):
    return FullAttentionSpec(block_size=block, num_kv_heads=heads, head_size=1, dtype=torch.float32)


def window(width, block=16):
    return SlidingWindowSpec(block_size=block, num_kv_heads=1, head_size=1, dtype=torch.float32, sliding_window=width)


def chunk(width):
    return ChunkedLocalAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=1, dtype=torch.float32, attention_chunk_size=width
    )


def mamba(block=16):
    return MambaSpec(block_size=block, shapes=((1, 1),), dtypes=(torch.float32,), mamba_cache_mode="align")


def scheduler(*specs, eagle=False, eagle_groups=(), unit=None, caching=True, **more):
    """As much of a scheduler as the facts are read from, with a real cache manager."""
    groups = [
        KVCacheGroupSpec([f"layer.{at}"], spec, **({"is_eagle_group": True} if at in eagle_groups else {}))
        for at, spec in enumerate(specs)
    ]
    sizes = [spec.block_size for spec in specs]
    config = KVCacheConfig(num_blocks=100, kv_cache_tensors=[], kv_cache_groups=groups)
    manager = KVCacheManager(
        kv_cache_config=config,
        max_model_len=4096,
        scheduler_block_size=math.lcm(*sizes),
        hash_block_size=unit or math.gcd(*sizes),
        enable_caching=caching,
        use_eagle=eagle,
    )
    return SimpleNamespace(kv_cache_manager=manager, kv_cache_config=config, **more)


def spec(kind, groups, block=16, span=0, eagle=False):
    return {"kind": kind, "block": block, "span": span, "eagle": eagle, "groups": groups}


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: scheduler(full()), {"specs": [spec("full", [0])]}),
        (lambda: scheduler(full(), eagle=True), {"specs": [spec("full", [0], eagle=True)]}),
        (lambda: scheduler(window(40)), {"specs": [spec("window", [0], span=40)]}),
        (
            # Groups of one spec are one, full attention comes first.
            lambda: scheduler(window(40), full(), window(40), window(100)),
            {"specs": [spec("full", [1]), spec("window", [0, 2], span=40), spec("window", [3], span=100)]},
        ),
        (
            # No group says that it is the draft model's: all drop a block.
            lambda: scheduler(full(), window(40), eagle=True),
            {"specs": [spec("full", [0], eagle=True), spec("window", [1], span=40, eagle=True)]},
        ),
        (
            lambda: scheduler(full(), window(40), window(40), eagle=True, eagle_groups=(2,)),
            {"specs": [spec("full", [0]), spec("window", [1, 2], span=40, eagle=True)]},
        ),
        (
            lambda: scheduler(full(32), window(40, 16)),
            {"align": 32, "specs": [spec("full", [0], block=32), spec("window", [1], span=40)]},
        ),
        (lambda: scheduler(full(), chunk(64)), {"specs": [spec("full", [0]), spec("chunk", [1], span=64)]}),
        (
            lambda: scheduler(full(64), mamba(64), unit=16),
            {"fine": True, "specs": [spec("full", [0], block=64), spec("mamba", [1], block=64)]},
        ),
        (
            lambda: scheduler(full(64), mamba(64)),
            {"unit": 64, "align": 64, "specs": [spec("full", [0], block=64), spec("mamba", [1], block=64)]},
        ),
    ],
)
def test_rules_are_the_coordinators(made, expected):
    rules = facts.rules(made())
    assert rules == {"unit": 16, "align": 16, "ahead": 0, "version": VERSION, "fine": False, **expected}


def uncacheable(one, at):
    one.kv_cache_manager.coordinator.attention_groups.pop(at)
    return one


class Odd:
    """A coordinator, a manager, or a spec that this version of kvatlas has never seen."""

    def find_longest_cache_hit(self):
        """Its own way."""


def odd_coordinator(one):
    one.kv_cache_manager.coordinator = Odd()
    return one


def odd_spec(one):
    one.kv_cache_config.kv_cache_groups[1] = SimpleNamespace(kv_cache_spec=Odd())
    return one


def odd_manager(one):
    first = one.kv_cache_manager.coordinator.single_type_managers[0]
    first.__class__ = type("Cleverer", (type(first),), {"find_longest_cache_hit": Odd.find_longest_cache_hit})
    return one


def other_pool(one):
    one.kv_cache_manager.coordinator.single_type_managers[0].block_pool = object()
    return one


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: scheduler(full(), caching=False), "prefix caching is off: every hit is 0 tokens long"),
        (lambda: scheduler(full(), prefix_replay_tokens=64), "short hits are replayed"),
        (lambda: scheduler(full(), aux_output_connector=1), "a connector of further outputs caps hits"),
        (lambda: odd_coordinator(scheduler(full())), "hits are searched by Odd, which is not known here"),
        (lambda: odd_spec(scheduler(full(), window(40))), "how Odd limits hits is not known here"),
        (lambda: odd_manager(scheduler(full())), "limits hits is not known here (it is searched by Cleverer)"),
        (lambda: other_pool(scheduler(full())), "the blocks of FullAttentionSpec are in a pool of their own"),
        (lambda: scheduler(*[window(16 + at) for at in range(9)]), "do not fit together"),
        (lambda: uncacheable(scheduler(full(64), window(40, 128)), 1), "only one is cached, with an alignment"),
        (lambda: SimpleNamespace(kv_cache_manager=None), "this vLLM's coordinator could not be read (AttributeError"),
    ],
)
def test_what_is_not_known_is_a_doubt(made, why):
    one = made()
    assert facts.rules(one) is None
    assert why in facts.doubt(one) and "\n" not in facts.doubt(one)


def test_layers_of_several_sizes_are_one_kind():
    uniform = SimpleNamespace(kv_cache_specs={"a": window(40), "b": window(40)})
    assert (facts.kind(facts.unwrapped(uniform)), facts.span(facts.unwrapped(uniform))) == ("window", 40)


NEWER = f"vLLM 0.99.1 is newer than this kvatlas: its hits are taken to end as those of {'.'.join(map(str, facts.NEWEST))}"


@pytest.mark.parametrize(
    ("said", "version", "note"),
    [
        ("0.32.0", (0, 32, 0), None),
        ("0.32.0+cpu", (0, 32, 0), None),
        ("v0.31.2.post1", (0, 31, 2), None),
        ("0.99.1", facts.NEWEST, NEWER),
        # Its attributes are those of 0.30 and later, and those of 0.33 are not there.
        ("0.32.1rc1", (0, 32, 999), "by its attributes its hits end as those of 0.32.x"),
        ("0.1.dev7+gabcdef", (0, 32, 999), "by its attributes"),
        ("dev", (0, 32, 999), "by its attributes"),
        ("", (0, 32, 999), "vLLM calls itself nothing"),
        ("0.19.1", (0, 32, 999), "vLLM calls itself 0.19.1: by its attributes"),
        ("0.33.0", (0, 32, 999), "vLLM calls itself 0.33.0: by its attributes"),
    ],
)
@pytest.mark.skipif(VERSION[:2] != (0, 32), reason="attributes of 0.32")
def test_version_and_attributes(said, version, note):
    got, told = facts.version(scheduler(full()), said)
    assert got == version and (told is None) == (note is None) and (note or "") in (told or "")
