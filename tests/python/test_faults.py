"""What goes wrong in the agent stays in the agent."""

import os

import pytest
from world import Engine, Reader, cached_keys, request, scheduler


def test_a_failing_hook_leaves_the_engine_unharmed_and_is_made_good(model):
    engine = Engine(scheduler(model, blocks=200), 1)
    agent, pool = engine.scheduler._kvatlas, engine.scheduler.kv_cache_manager.block_pool
    reader = Reader(agent)

    class Broken:
        """In the agent's place on the pool: both hooks of the pool raise, since they find no agent."""

        fault = agent.fault

    engine.add(request("before", list(range(100)), max_tokens=1))
    engine.step()
    pool._kvatlas = Broken()
    engine.add(request("during", list(range(1000, 1100)), max_tokens=1))
    engine.step()
    pool._kvatlas = agent
    reader.read(lambda r: r.state is not None and r.state["steps"] == engine.steps)
    assert (len(cached_keys(pool)), reader.set) == (12, set()), "what may be wrong is not published"
    assert (reader.state["unnamed"], reader.state["counters"]["faults"]) == (12, 2)

    # A live request that hits the blocks gives them their names back, and predicts nothing meanwhile.
    for name, start in [("again", 0), ("again-2", 1000)]:
        engine.add(request(name, list(range(start, start + 100)), max_tokens=1))
        engine.step()
    reader.read(lambda r: r.state["steps"] == engine.steps)
    assert reader.state["unnamed"] == 0
    assert reader.set == engine.names.reachable(cached_keys(pool))
    started = {life["id"]: life for event, life in reader.lives if event == "started"}
    assert started["again"]["cached_tokens"] == 96 and started["again"]["predicted_tokens"] is None
    engine.add(request("last", list(range(100)), max_tokens=1))
    engine.step()
    reader.read(lambda r: r.state["steps"] == engine.steps)
    started = {life["id"]: life for event, life in reader.lives if event == "started"}
    assert started["last"]["cached_tokens"] == started["last"]["predicted_tokens"] == 96
    reader.close()
    agent.stop()


def test_an_exception_of_the_engine_is_its_own(model):
    engine = Engine(scheduler(model, blocks=20), 1)
    pool = engine.scheduler.kv_cache_manager.block_pool
    with pytest.raises(ValueError, match="Cannot get 1000 free blocks"):
        pool.get_new_blocks(1000)
    engine.scheduler._kvatlas.stop()


def test_a_forked_child_lets_go(model):
    engine = Engine(scheduler(model, blocks=200), 1)
    agent = engine.scheduler._kvatlas
    reader = Reader(agent)
    there, here = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            # The child's scheduler works on, without an agent: nothing is said twice, and nothing hangs.
            engine.add(request("child", list(range(100)), max_tokens=1))
            engine.step()
            os.write(here, f"{agent.events!r} {len(engine.scheduler.requests)}".encode())
        finally:
            os._exit(0)
    assert os.read(there, 100) == b"'' 0"
    assert os.waitpid(child, 0) == (child, 0)
    engine.add(request("parent", list(range(100)), max_tokens=1))
    engine.step()
    reader.read(lambda r: r.state is not None and r.state["steps"] == engine.steps)
    assert [life["id"] for event, life in reader.lives if event == "arrived"] == ["parent"]
    assert len(reader.set) == 6
    reader.close()
    agent.stop()


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [("KVATLAS_SEED", "x", "KVATLAS_SEED"), ("KVATLAS_SECRET", "s", "KVATLAS_SECRET"), ("KVATLAS_ENABLED", "0", None)],
)
def test_settings_turn_the_agent_off_not_the_engine(model, monkeypatch, caplog, name, value, said):
    monkeypatch.setenv(name, value)
    engine = Engine(scheduler(model, blocks=50), 1)
    assert getattr(engine.scheduler, "_kvatlas", None) is None
    lines = [record.getMessage() for record in caplog.records if record.name == "vllm.plugins.kvatlas"]
    assert len(lines) == (said is not None) and all(said in line for line in lines)
    engine.add(request("r", list(range(100)), max_tokens=3))
    while engine.scheduler.requests:
        engine.step()
    assert len(cached_keys(engine.scheduler.kv_cache_manager.block_pool)) == 6


def test_requests_without_sense_are_refused(model):
    engine = Engine(scheduler(model, blocks=50), 1)
    reader = Reader(engine.scheduler._kvatlas)
    assert "refused" in reader.ask({"nonsense": {}})
    assert "refused" in reader.ask("x" * 4000)
    assert reader.ask({"snapshot": {"cut": 12345, "piece": 0}}) == "nosnapshot"
    assert reader.ask({"bundle": {"digest": "00", "offset": 0}}) == "nobundle"
    assert reader.ask({"replay": {"from": 0}})["replay"]["from"] == 0
    far = reader.ask({"replay": {"from": 2**60}})["replay"]
    assert far["payloads"] == []
    reader.close()
    engine.scheduler._kvatlas.stop()
