"""How a gateway reaches a rank, for each way in which vLLM lays ranks and API servers out."""

from types import SimpleNamespace

import pytest

from kvatlas import reach


def told(monkeypatch, command, **parallel):
    monkeypatch.setattr("sys.argv", ["vllm", "serve", "model", *command.split()])
    return reach.http(SimpleNamespace(**parallel))


def test_one_server_one_rank(monkeypatch):
    assert told(monkeypatch, "") == (None, 8000, None)
    assert told(monkeypatch, "--host 10.0.0.7 --port 8101") == ("10.0.0.7", 8101, None)
    assert told(monkeypatch, "--uds /run/vllm.sock") == (None, None, None)
    assert told(monkeypatch, "--port=nonsense") == (None, 8000, None)


def test_a_program_without_a_server_has_no_address(monkeypatch):
    monkeypatch.setattr("sys.argv", ["batch.py"])
    assert reach.http(SimpleNamespace()) == (None, None, None)


@pytest.mark.parametrize("size", ["--data-parallel-size 4", "-dp 4", "--data_parallel_size=4"])
def test_f5_one_server_before_all_ranks_asks_for_the_global_rank(monkeypatch, size):
    # A dense model's engine thinks that it is alone (size 1, rank 0): the command line and the index know better.
    dense = dict(data_parallel_size=1, data_parallel_rank=0, data_parallel_index=3, data_parallel_rank_local=3)
    assert told(monkeypatch, size, **dense) == (None, 8000, 3)
    mixture = dict(data_parallel_size=4, data_parallel_rank=3, data_parallel_rank_local=3)
    assert told(monkeypatch, size, **mixture) == (None, 8000, 3)


def test_f5_a_node_without_a_server_names_the_first_node(monkeypatch):
    ranks = dict(data_parallel_size=16, data_parallel_index=9, data_parallel_master_ip="10.0.0.1")
    command = "--headless --data-parallel-size 16 --data-parallel-start-rank 8"
    assert told(monkeypatch, command, **ranks) == ("10.0.0.1", 8000, 9)


def test_f5_a_server_a_node_asks_for_the_local_rank(monkeypatch):
    ranks = dict(data_parallel_size=16, data_parallel_index=9, data_parallel_hybrid_lb=True)
    command = "--data-parallel-size 16 --data-parallel-start-rank 8 --data-parallel-hybrid-lb"
    assert told(monkeypatch, command, data_parallel_rank_local=1, **ranks) == (None, 8000, 1)
    assert told(monkeypatch, command, data_parallel_rank_local=None, **ranks) == (None, 8000, 1)


def test_f5_a_server_a_rank_asks_for_none(monkeypatch):
    ranks = dict(data_parallel_size=16, data_parallel_index=9)
    assert told(monkeypatch, "--port 8009 -dp 16 --data-parallel-rank 9", **ranks) == (None, 8009, None)
    assert told(monkeypatch, "--port 8009 -dp 16", data_parallel_external_lb=True, **ranks) == (None, 8009, None)


def test_f6_ranks_of_one_supervisor_have_ports_in_a_row(monkeypatch):
    # All share one command line; each says its own rank and port.
    command = "--data-parallel-multi-port-external-lb -dp 16 --data-parallel-size-local 8 --node-rank 1 --port 9000"
    for rank in (8, 9, 15):
        ranks = dict(data_parallel_size=16, data_parallel_index=rank, data_parallel_external_lb=True)
        assert told(monkeypatch, command, **ranks) == (None, 9000 + rank - 8, None)
