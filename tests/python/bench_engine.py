"""What the agent costs a real engine's throughput: the same work with and without it, in turns.

    python tests/python/bench_engine.py MODEL_DIRECTORY [--rounds 3]

Each turn is an engine of its own (its core is a process of its own, as in production) that answers the same prompts:
conversations that share beginnings, so that blocks are hit, cached and evicted. The first pass warms up. Numbers are for
reading: a difference smaller than the spread of one side is noise.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import subprocess
import sys
import time

PASSES = 4


def work(model: str) -> None:
    """One engine: prints the tokens a second of each pass but the first."""
    os.environ.update(
        VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_CPU_OMP_THREADS_BIND="nobind",
        VLLM_HOST_IP="127.0.0.1",
        VLLM_LOGGING_LEVEL="ERROR",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        KVATLAS_BIND="tcp://127.0.0.1:0",
        KVATLAS_CONTROL="tcp://127.0.0.1:0",
        KVATLAS_LOG="error",
    )
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model,
        enforce_eager=True,
        dtype="bfloat16",
        max_model_len=4096,
        max_num_seqs=16,
        block_size=32,
        num_gpu_blocks_override=512,
    )
    rnd = random.Random(1)
    shared = [[rnd.randrange(3, 500) for _ in range(256)] for _ in range(8)]
    for turn in range(PASSES):
        prompts = [
            {"prompt_token_ids": shared[at % 8] + [rnd.randrange(3, 500) for _ in range(rnd.randrange(16, 256))]}
            for at in range(64)
        ]
        begun = time.perf_counter()
        answers = llm.generate(prompts, SamplingParams(max_tokens=32, ignore_eos=True), use_tqdm=False)
        spent = time.perf_counter() - begun
        tokens = sum(len(a.prompt_token_ids) + len(a.outputs[0].token_ids) for a in answers)
        if turn > 0:
            print(f"RATE {tokens / spent:.1f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--work", action="store_true")
    args = parser.parse_args()
    if args.work:
        work(args.model)
        return
    rates: dict[str, list[float]] = {"without": [], "with": []}
    for turn in range(args.rounds):
        for which in ("without", "with") if turn % 2 == 0 else ("with", "without"):
            env = dict(os.environ, KVATLAS_ENABLED="1" if which == "with" else "0")
            command = [sys.executable, "-W", "ignore", __file__, args.model, "--work"]
            done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
            found = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("RATE")]
            if done.returncode != 0 or len(found) != PASSES - 1:
                sys.exit(f"the engine failed ({done.returncode}):\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
            rates[which] += found
            print(f"round {turn + 1} {which:8} {' '.join(f'{rate:8.0f}' for rate in found)} tokens/s", flush=True)
    print("throughput of a real engine, prompt and output tokens a second")
    for which, all in rates.items():
        print(f"  {which:8} median {statistics.median(all):8.0f}   least {min(all):8.0f}   most {max(all):8.0f}")
    print(f"  with / without, of the medians: {statistics.median(rates['with']) / statistics.median(rates['without']):.3f}")


if __name__ == "__main__":
    main()
