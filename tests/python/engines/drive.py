"""Drives the real KVCacheManager of one vLLM with random work, the agent attached as in production, and compares after
every step: each published set with what the pool truly holds, and each hit predicted from the published sets, and by
the agent, with what the engine gives.

    python drive.py [--steps 1000] [--searches 2000] [--seed 1] [--case NAME] [--index PROGRAM]

The vLLM is the one on PYTHONPATH. With the program of the index it follows the agent too, and is asked the same. Prints a line for each case; ends with 1 when anything differed.
"""

import argparse
import logging
import os
import pathlib
import random
import sys
import time
import traceback
from types import SimpleNamespace
from typing import Any

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]
sys.path.append(str(HERE / "shims"))  # last: what is really installed comes first

for name in [name for name in os.environ if name.startswith("KVATLAS_")]:
    del os.environ[name]
os.environ.update(
    KVATLAS_BIND="tcp://127.0.0.1:0",
    KVATLAS_CONTROL="tcp://127.0.0.1:0",
    KVATLAS_ENGINE="differential",
    KVATLAS_SEED="77",
    KVATLAS_HEARTBEAT_MS="50",
    KVATLAS_LOG="error",
    VLLM_TARGET_DEVICE="cpu",
    VLLM_LOGGING_LEVEL="ERROR",
)

import torch  # noqa: E402

if not hasattr(torch._C._cpu, "_is_avx512_supported"):
    torch._C._cpu._is_avx512_supported = lambda: False  # vLLM 0.17 asks this of the torch of its time

import kvatlas.plugin as plugin  # noqa: E402
import msgspec  # noqa: E402
from kvatlas._agent import find_hit  # noqa: E402

import engine  # noqa: E402
import truth  # noqa: E402
from behind import Index  # noqa: E402
from cases import cases  # noqa: E402
from engine import VERSION, Case, Engine  # noqa: E402
from finder import compare_finder, rule  # noqa: E402
from reader import KINDS, Reader  # noqa: E402

MOST_LIVE = 10
PLAIN = {"kind": "full", "span": 0, "eagle": False, "set": 0, "partial": None}


class Different(AssertionError):
    """The agent and the engine disagree."""


class Work:
    """Random work on one engine."""

    def __init__(self, case: Case, seed: int, index: str) -> None:
        self.rnd = random.Random(f"{seed}-{case.name}-{VERSION}")
        few = self.rnd.choice((30, 40, 55))
        self.engine = Engine(case, blocks=few * len(case.groups) + (40 if self.block(case) < 64 else 10))
        plugin._made(self.engine, None, (), {})
        self.agent = self.engine._kvatlas
        self.manager, self.pool = self.engine.kv_cache_manager, self.engine.pool
        self.names = truth.Names(case)
        self.reader = Reader(self.agent)
        self.case, self.rule = case, self.reader.state["rule"]
        self.compare_rule()
        self.done: list[tuple[list[int], str | None, str]] = []
        self.delivered: dict[str, int] = {}
        self.counts = dict.fromkeys(("lookups", "hits", "preempted", "resumed", "resets", "refused", "copies", "waited"), 0)
        self.made = 0
        self.index = Index(index, self.agent, truth.SEED) if index else None
        size = self.engine.block_size * 12
        self.roots = [
            ([self.token() for _ in range(size)], self.pick((None, None, "salt-a", "salt-b")), self.pick(("", "", "", "lora-x", "lora-y")))
            for _ in range(10)
        ]

    @staticmethod
    def block(case: Case) -> int:
        return max(group.block for group in case.groups)

    def pick(self, some: Any) -> Any:
        return self.rnd.choice(some)

    def token(self) -> int:
        return self.rnd.randrange(5000)

    def close(self) -> None:
        if self.index:
            self.index.close()
        self.reader.close()
        self.agent.stop()

    def request(self) -> Any:
        """A prompt like those before it: a repeat, a whole number of blocks, or a shared start with an own end."""
        self.made += 1
        how, (root, salt, adapter) = self.rnd.random(), self.pick(self.roots)
        unit = self.engine.hash_block_size
        if self.done and how < 0.25:
            tokens, salt, adapter = self.pick(self.done)
        elif how < 0.45:
            tokens = root[: unit * self.rnd.randrange(1, len(root) // unit + 1)]
        else:
            own = self.rnd.randrange(0, 5 * self.engine.block_size // 2)
            tokens = root[: self.rnd.randrange(1, len(root) + 1)] + [self.token() for _ in range(own)]
        request = self.engine.request(f"r{self.made}", tokens, salt, adapter)
        self.names.learn(request)
        return request

    # ---- what the engine does ----

    def look_up(self, request: Any, told: bool) -> Any:
        """The engine's lookup. `told`: everything is published, so that what was published can be asked too."""
        expected = answered = None
        if told:
            self.settle()
            expected = self.predicted(request)
            if self.index:
                self.index.reach(self.reader.next - 1)
                answered = self.index.cached_tokens(request)
        found = self.manager.get_computed_blocks(request)
        self.counts["lookups"] += 1
        self.counts["hits"] += found[1] > 0
        if told and expected != found[1]:
            raise Different(f"{request.request_id} of {request.num_tokens} tokens: published sets say {expected}, the engine {found[1]}")
        if answered not in (None, found[1]):
            raise Different(f"{request.request_id} of {request.num_tokens} tokens: the index says {answered}, the engine {found[1]}")
        return found

    def admit(self, request: Any) -> bool:
        first = request.request_id not in self.delivered
        found = self.look_up(request, told=self.rnd.random() < 0.5)
        if hasattr(request, "shared_prefix_boundary") and len(found) > 2:
            request.shared_prefix_boundary = found[2]
        if not self.compute(request, found[1], found[0]):
            return False
        if first:
            self.delivered[request.request_id] = found[1]
            self.started([request.request_id])
        return True

    def compute(self, request: Any, hit: int = 0, blocks: Any = None) -> bool:
        """Gives the request room for a chunk of tokens, and "computes" them. False when there is no room."""
        left = request.num_tokens - request.num_computed_tokens - hit
        tokens = left if self.rnd.random() < 0.5 else self.rnd.randrange(1, left + 1)
        tokens = self.engine.split(request, tokens, hit)
        if tokens == 0:
            tokens = self.engine.split(request, left, hit)
        if tokens == 0:
            return False
        more: dict[str, Any] = {}
        drafts = 0
        if self.case.eagle and self.rnd.random() < 0.7:
            more["num_lookahead_tokens"] = 3
            if request.num_computed_tokens + hit + tokens == request.num_tokens and not self.mamba() and blocks is None:
                drafts = self.rnd.randrange(0, 4)
        if blocks is not None:
            more.update(num_new_computed_tokens=hit, new_computed_blocks=blocks)
        if self.manager.allocate_slots(request, tokens + drafts, **more) is None:
            return False
        request.num_computed_tokens += hit + tokens
        for _ in range(self.rnd.randrange(0, drafts + 1)):  # drafts that were right
            self.generate(request)
            request.num_computed_tokens += 1
        return True

    def mamba(self) -> bool:
        return any(group.kind == "mamba" for group in self.case.groups)

    def generate(self, request: Any) -> None:
        request.append_output_token_ids(self.token())
        self.names.learn(request)

    def started(self, ids: list[str]) -> None:
        new = [SimpleNamespace(req_id=id) for id in ids]
        plugin._scheduled(self.engine, SimpleNamespace(scheduled_new_reqs=new, num_scheduled_tokens={}, finished_req_ids=()), (), {})

    def preempt(self) -> None:
        request = self.engine.running.pop(self.rnd.randrange(len(self.engine.running)))
        self.manager.free(request)
        request.num_computed_tokens = 0
        self.engine.waiting.insert(0, request)
        self.counts["preempted"] += 1

    def finish(self, request: Any, reason: str = "stop") -> None:
        self.manager.free(request)
        self.agent.finished(request.request_id, reason)
        del self.engine.requests[request.request_id]
        self.done.append((list(request._all_token_ids), request.cache_salt, request.lora_request.lora_name if request.lora_request else ""))
        del self.done[:-30]

    def step(self) -> None:
        """One engine step: running requests, then waiting ones, then what comes from outside."""
        running, waiting = self.engine.running, self.engine.waiting
        self.engine.step_starts()
        for request in self.rnd.sample(running, self.rnd.randrange(len(running) + 1)):
            if request not in running:
                continue  # preempted
            if request.num_computed_tokens >= request.num_tokens:
                self.generate(request)
            if not self.compute(request):
                self.preempt()
        while len(running) < MOST_LIVE and self.rnd.random() < 0.5:
            if waiting and self.rnd.random() < 0.6:
                request = waiting.pop(0)
                self.counts["resumed"] += 1
            else:
                request = self.request()
                self.engine.requests[request.request_id] = request
                plugin._arrived(self.engine, None, (request,), {})
            if self.admit(request):
                running.append(request)
            else:
                waiting.insert(0, request)
                self.counts["waited"] += 1
                break
        self.counts["copies"] += self.engine.step_ends()
        for request in list(running):
            if self.rnd.random() < 0.06:
                running.remove(request)
                self.finish(request)
        while len(waiting) > 6:
            self.finish(waiting.pop(), "abort")
        if self.rnd.random() < 0.05 and hasattr(self.pool, "evict_blocks"):
            self.pool.evict_blocks({self.rnd.randrange(1, self.pool.num_gpu_blocks) for _ in range(4)})
        if self.rnd.random() < 0.01:
            if self.rnd.random() < 0.4:
                while running:
                    self.finish(running.pop(), "abort")
            self.counts["resets" if self.manager.reset_prefix_cache() else "refused"] += 1

    # ---- what is compared ----

    def settle(self) -> None:
        """Waits until everything that happened so far is published."""
        self.made += 1
        mark = f"mark{self.made}"
        self.agent.finished(mark, "mark")
        plugin._updated(self.engine, None, (), {})
        self.reader.read(lambda: mark in self.reader.finished)
        self.reader.finished.clear()

    def hits(self) -> dict[str, Any]:
        if self.rule == "closed":
            unit = self.engine.hash_block_size
            return {"unit": unit, "align": unit, "version": list(VERSION), "specs": [PLAIN | {"block": unit}]}
        if not isinstance(self.rule, dict):
            raise Different(f"the agent does not know how hits end: rule {self.rule}")
        return self.rule["sets"]

    def compare_rule(self) -> None:
        """What is published of how hits end is what decides it in this engine."""
        own, told = msgspec.msgpack.decode(rule(self.engine)), self.hits()
        nothing = {"ahead": 0, "fine": False}
        if nothing | told != own:
            raise Different(f"the agent says that hits end by {told}, they do by {own}")

    def predicted(self, request: Any) -> int | None:
        chain = self.names.chain(request)
        held = [self.reader.sets["gpu"], *(self.reader.sets[f"s{n}"] for n in range(1, 8))]
        return find_hit(msgspec.msgpack.encode(self.hits()), request.num_tokens, lambda number, at: chain[at] in held[number])

    def compare(self) -> None:
        """Everything is published: the sets are the pool's."""
        hits = self.hits()
        expected: dict[str, set[int]] = {kind: set() for kind in KINDS}
        for spec, (whole, inside) in zip(hits["specs"], truth.sets(self.pool, self.names, hits.get("fine", False)), strict=True):
            expected["gpu" if spec["set"] == 0 else f"s{spec['set']}"] = whole
            if spec.get("partial") is not None:
                expected[f"s{spec['partial']}"] = inside
        for kind in KINDS:
            told = self.reader.sets[kind]
            if kind == "any" and told != expected["gpu"]:
                continue  # there is no lower tier here, so it may be left out
            if kind != "any" and told != expected[kind]:
                raise Different(f"{kind}: {len(told - expected[kind])} too many, {len(expected[kind] - told)} missing of {len(expected[kind])}")
        if self.index:
            self.index.reach(self.reader.next - 1)
            for kind in KINDS:
                if kind != "any" and self.index.members(kind) != expected[kind]:
                    raise Different(f"{kind}: the index has another set than the pool")
        state = self.reader.state
        if (state["unnamed"], state["counters"]["faults"]) != (0, 0):
            raise Different(f"{state['unnamed']} blocks without a name, {state['counters']['faults']} faults in hooks")
        if hits["specs"][0]["kind"] == "full":
            steps = hits["specs"][0]["block"] // hits["unit"]
            for fp, parent in self.reader.parent["gpu"].items():
                if parent != self.names.up(fp, steps):
                    raise Different("a block of the closed set follows another one than in its prompt")

    def probe(self) -> None:
        """A lookup that nothing follows; the agent's own prediction is asked too."""
        request = self.request()
        plugin._arrived(self.engine, None, (request,), {})
        found = self.look_up(request, told=True)
        self.delivered[request.request_id] = found[1]
        self.started([request.request_id])
        self.agent.finished(request.request_id, "abort")

    def judge(self) -> None:
        """What the agent said of the requests that were scheduled."""
        for id, life in self.reader.started.items():
            told = (life["cached_tokens"], life.get("predicted_tokens"))
            if told != (self.delivered[id], self.delivered[id]):
                raise Different(f"{id}: the agent says {told} (cached, predicted), the engine {self.delivered[id]}")
        self.reader.started.clear()


def blame(error: BaseException) -> str | None:
    """The engine's own words, when the error is raised inside vLLM."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    if "/vllm/" not in last.filename.replace(os.sep, "/"):
        return None
    return f"{type(error).__name__} in {pathlib.Path(last.filename).name}:{last.lineno}: {str(error)[:80] or last.line}"


def run(case: Case, steps: int, searches: int, seed: int, index: str) -> tuple[str, bool]:
    """One case: a line to print, and whether all was equal."""
    begun = time.monotonic()
    try:
        Engine(case, blocks=10)
    except (AssertionError, NotImplementedError, ValueError) as error:
        why = blame(error)
        if why is None:
            raise
        return f"not in this vLLM: {why}", True
    searched, difference = compare_finder(case, searches, seed)
    if difference:
        return f"DIFFERENT, the search alone: {difference}", False
    if not steps:
        return f"searches {searched} | {time.monotonic() - begun:.1f} s", True
    work, step = None, 0
    try:
        work = Work(case, seed, index)
        for step in range(1, steps + 1):
            work.step()
            work.settle()
            work.compare()
            work.probe()
            work.judge()
            if step % 150 == 149:
                work.settle()  # or what was told up to the cut is not seen
                work.reader.snapshot()
                work.compare()
        counts = " ".join(f"{name} {count}" for name, count in work.counts.items() if count)
        words = f"steps {step} {counts} digests {work.reader.digests} searches {searched}"
        return f"{words} | {time.monotonic() - begun:.1f} s", True
    except Exception as error:
        own = isinstance(error, Different)
        text = str(error) if own else traceback.format_exc()
        return f"DIFFERENT at step {step}, seed {seed}: {text}", False
    finally:
        if work is not None:
            work.close()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--searches", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--case", default="")
    parser.add_argument("--index", default="", help="the program kvatlas-index")
    parser.add_argument("--expect", default="", help="the vLLM that must be on the path")
    given = parser.parse_args()
    logging.getLogger("vllm").setLevel(logging.ERROR)
    plugin._export = lambda agent, config: None  # there is no tokenizer here
    plugin.register()
    engine.start()
    version = ".".join(map(str, VERSION))
    if given.expect not in ("", version):
        raise SystemExit(f"vLLM {version} is on the path, {given.expect} is expected")
    bad = []
    for case in cases():
        if given.case and given.case != case.name:
            continue
        line, good = run(case, given.steps, given.searches, given.seed, given.index)
        print(f"{version} {case.name}: {line}", flush=True)
        if not good:
            bad.append(case.name)
    print(f"{version}: {'all equal' if not bad else 'DIFFERENT: ' + ', '.join(bad)}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
