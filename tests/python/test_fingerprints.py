"""The golden fingerprints, by the Python implementation that the other tests trust."""

import json
import pathlib

import xxh

GOLDEN = json.loads((pathlib.Path(__file__).parent.parent / "golden" / "fingerprints.json").read_text())


def test_chains():
    assert len(GOLDEN["chains"]) >= 7
    for one in GOLDEN["chains"]:
        root = xxh.root(one["model"], one["adapter"], one["salt"], int(one["seed"], 16))
        assert root == int(one["root"], 16)
        chain = xxh.chain(root, one["block_size"], one["tokens"])
        assert chain == [int(fp, 16) for fp in one["fingerprints"]]


def test_extras_and_digests():
    for one in GOLDEN["extras"]:
        assert xxh.block(int(one["parent"], 16), one["tokens"], one["extras"]) == int(one["fingerprint"], 16)
    for one in GOLDEN["digests"]:
        digest = xxh.digest(int(fp, 16) for fp in one["members"])
        assert (digest["count"], digest["sum"]) == (one["count"], [int(half, 16) for half in one["sum"]])
