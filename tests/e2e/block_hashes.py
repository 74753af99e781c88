"""The engine's own hashes of the full blocks of token sequences, by vLLM's own code.

    python block_hashes.py BLOCK_SIZE < sequences > hashes

Reads one JSON list of token ids a line and writes one JSON list of hashes (hex) a line. vLLM's first parent hash is
the same in every process since 0.29, unless PYTHONHASHSEED is set.
"""

import json
import sys

from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import hash_block_tokens, init_none_hash


def main() -> None:
    size = int(sys.argv[1])
    init_none_hash(sha256)
    for line in sys.stdin:
        tokens = json.loads(line)
        hashes, parent = [], None
        for start in range(0, len(tokens) - size + 1, size):
            parent = hash_block_tokens(sha256, parent, tokens[start : start + size], None)
            hashes.append(parent.hex())
        print(json.dumps(hashes))


if __name__ == "__main__":
    main()
