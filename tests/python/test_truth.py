"""What is published is what the pool holds, and what is predicted is what the engine takes from it."""

import random

import pytest
from world import Engine, Reader, cached_keys, request, scheduler


def random_request(rnd: random.Random, roots: list[list[int]], at: int):
    tokens = rnd.choice(roots)[: rnd.randrange(1, 200)]
    if rnd.random() < 0.5:
        tokens = tokens + [rnd.randrange(4000) for _ in range(rnd.randrange(1, 60))]
    salt = rnd.choice([None, None, None, "tenant-a", "tenant-b"])
    adapter = rnd.choice(["", "", "", "lora-x", "lora-y"])
    return request(f"r{at}", tokens, max_tokens=rnd.randrange(1, 50), salt=salt, adapter=adapter)


def quiet(engine: Engine, reader: Reader, seed: int) -> None:
    """Reads until a heartbeat of the last step, then compares the sets."""
    reader.read(lambda r: r.state is not None and r.state["steps"] == engine.steps)
    keys = cached_keys(engine.scheduler.kv_cache_manager.block_pool)
    truth = engine.names.reachable(keys)
    assert reader.set == truth, f"seed {seed}: {len(reader.set - truth)} too many, {len(truth - reader.set)} missing"
    assert (reader.state["unnamed"], reader.state["counters"]["faults"]) == (0, 0)


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_random_work(model, seed, asynchronous):
    rnd = random.Random(seed)
    engine = Engine(scheduler(model, blocks=90, asynchronous=asynchronous), seed)
    agent = engine.scheduler._kvatlas
    reader = Reader(agent)
    roots = [[rnd.randrange(4000) for _ in range(200)] for _ in range(6)]
    made = 0
    for turn in range(400):
        for _ in range(rnd.choice([0, 0, 1, 2])):
            if len(engine.scheduler.requests) < 24:
                engine.add(random_request(rnd, roots, made))
                made += 1
        if rnd.random() < 0.02 and engine.scheduler.requests:
            from vllm.v1.request import RequestStatus

            engine.scheduler.finish_requests(rnd.choice(list(engine.scheduler.requests)), RequestStatus.FINISHED_ABORTED)
        if rnd.random() < 0.01:
            engine.scheduler.reset_prefix_cache(reset_running_requests=rnd.random() < 0.5)
        if rnd.random() < 0.02:
            pool = engine.scheduler.kv_cache_manager.block_pool
            pool.evict_blocks({rnd.randrange(1, 90) for _ in range(3)})
        engine.step()
        if turn % 40 == 39:
            quiet(engine, reader, seed)
        if turn % 130 == 129:
            quiet(engine, reader, seed)  # or the steps in the lives of requests up to the cut are not seen
            reader.snapshot()
    while engine.scheduler.requests:
        engine.step()
    assert engine.scheduler.reset_prefix_cache()
    engine.add(random_request(rnd, roots, made))
    engine.step()
    quiet(engine, reader, seed)

    started = {life["id"]: life for event, life in reader.lives if event == "started"}
    assert len(started) > 100
    for id, life in started.items():
        assert life["cached_tokens"] == engine.delivered[id], f"seed {seed} {id}"
        assert life["predicted_tokens"] == engine.delivered[id], f"seed {seed} {id}: {life}"
    assert sum(life["cached_tokens"] > 0 for life in started.values()) > 20
    assert engine.preempted > 0 and reader.clears > 0
    arrived = [life["id"] for event, life in reader.lives if event == "arrived"]
    finished = {life["id"] for event, life in reader.lives if event == "finished"}
    assert arrived == [f"r{at}" for at in range(made + 1)]
    assert finished == set(arrived) - set(engine.scheduler.requests)
    assert {name for _, name in reader.roots.values()} == {"", "lora-x", "lora-y"}
    audit = reader.ask({"audit": {"from": 0}})["audit"]
    assert audit["next"] is None
    pool = engine.scheduler.kv_cache_manager.block_pool
    assert {bytes(key) for _, key in audit["blocks"]} == cached_keys(pool)
    reader.close()
    agent.stop()


def test_a_clear_leaves_an_idle_engine_at_once(model):
    engine = Engine(scheduler(model, blocks=90), 1)
    reader = Reader(engine.scheduler._kvatlas)
    engine.add(request("a", list(range(100)), max_tokens=1))
    while engine.scheduler.requests:
        engine.step()
    quiet(engine, reader, 1)
    assert len(reader.set) == 6
    assert engine.scheduler.reset_prefix_cache()
    reader.read(lambda r: r.clears == 1, seconds=5)
    assert reader.set == set()
    reader.close()
    engine.scheduler._kvatlas.stop()


def test_load_is_told(model):
    engine = Engine(scheduler(model, blocks=200, max_num_seqs=2, budget=64), 1)
    reader = Reader(engine.scheduler._kvatlas)
    for at in range(4):
        engine.add(request(f"r{at}", [at] * 100, max_tokens=5, adapter="lora-x" if at == 3 else ""))
    engine.step()
    reader.read(lambda r: r.state is not None and r.state["steps"] == engine.steps)
    state = reader.state
    # Of 400 prompt tokens 64 are computed; one request runs, or two when the first left room.
    assert (state["running"] + state["waiting"], state["backlog_tokens"]) == (4, 400 - 64)
    assert state["adapters_waiting"] == ["lora-x"] and 0 < state["kv_use"] < 0.2
    assert (state["max_num_seqs"], state["total_blocks"], state["block_size"]) == (2, 200, 16)
    assert (state["models"], state["rule"], state["engine"]) == (["base"], "closed", "pytest.0")
    while engine.scheduler.requests:
        engine.step()
    reader.read(lambda r: r.state["steps"] == engine.steps)
    assert (reader.state["running"], reader.state["waiting"], reader.state["backlog_tokens"]) == (0, 0, 0)
    reader.close()
    engine.scheduler._kvatlas.stop()
