"""``python -m kvatlas doctor``."""

from __future__ import annotations

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m kvatlas", description="The kvatlas agent for vLLM.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what the agent finds in this image, with a fix for what does not fit")
    doctor.add_argument("--json", action="store_true", help="for programs: {ok, checks: [{name, mark, said, fix}]}")
    doctor.add_argument("--rank", type=int, help="data-parallel rank of the engine (default: VLLM_DP_RANK, or 0)")
    told = parser.parse_args()
    from kvatlas import doctor as examination

    return examination.main(as_json=told.json, rank=told.rank)


if __name__ == "__main__":
    sys.exit(main())
