"""What a KV connector reports of tiers below the GPU is in the *any* set, and only there."""

from typing import Any

import pytest
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata
from vllm.v1.core.kv_cache_utils import maybe_convert_block_hash
from world import Engine, Reader, request, scheduler

from kvatlas import tiers


class Connector(KVConnectorBase_V1):
    """Brings nothing, and reports what a test puts into `events`, once, as a generator like vLLM's own ones."""

    def __init__(self) -> None:
        self.events: list[Any] = []

    def take_events(self) -> Any:
        events, self.events = self.events, []
        yield from events

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        return False, None

    def start_load_kv(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_layer_load(self, layer_name: str) -> None: ...
    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_for_save(self) -> None: ...


def stored(hashes: list[Any], medium: str, tokens: list[int] | None = None, group: int | None = None) -> BlockStored:
    return BlockStored(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=tokens or [],
        block_size=0,
        lora_id=None,
        medium=medium,
        lora_name=None,
        group_idx=group,
    )


@pytest.fixture
def world(model):
    engine = Engine(scheduler(model, blocks=40), 1)
    agent, connector = engine.scheduler._kvatlas, Connector()
    engine.scheduler.vllm_config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
    engine.scheduler.connector = connector
    tiers.follow(engine.scheduler, agent)
    reader = Reader(agent)
    yield engine, connector, reader
    reader.close()
    agent.stop()


def run(engine: Engine, reader: Reader, id: str, start: int, blocks: int) -> Any:
    """A request of so many blocks and one token, to its end."""
    one = request(id, [start + i for i in range(16 * blocks + 1)], max_tokens=2)
    engine.add(one)
    while engine.scheduler.requests:
        engine.step()
    reader.read(lambda r: r.state is not None and r.state["steps"] == engine.steps)
    return one


def names(engine: Engine, one: Any) -> list[int]:
    return [engine.names.fingerprint[bytes(key)] for key in one.block_hashes]


def test_any_grows_and_shrinks_with_what_is_below(world):
    engine, connector, reader = world
    one = run(engine, reader, "a", 0, 6)
    chain = names(engine, one)
    keys = list(one.block_hashes)
    # Bytes and numbers, any case, any known name; a group that is not the first says nothing.
    connector.events = [
        stored(keys[:2], "CPU"),
        stored([maybe_convert_block_hash(key) for key in keys[2:4]], "storage"),
        stored(keys[4:], "Tape"),
        stored([keys[0]], "cpu", group=1),
        stored([b"x" * 32], "cpu"),
    ]
    run(engine, reader, "b", 1000, 1)
    assert reader.sets["any"] >= set(chain)
    assert (reader.state["counters"]["unknown_media"], reader.state["counters"]["unknown_below"]) == (2, 1)
    # The GPU is filled with other prompts: what is below stays in any.
    for at in range(8):
        run(engine, reader, f"c{at}", 2000 + 1000 * at, 8)
    assert not reader.set & set(chain) and reader.sets["any"] >= set(chain)
    assert reader.set <= reader.sets["any"]
    connector.events = [BlockRemoved(block_hashes=[keys[1]], medium="CPU")]
    run(engine, reader, "d", 20_000, 1)
    assert chain[0] in reader.sets["any"] and not reader.sets["any"] & set(chain[1:]), "closed: what follows is out of reach"
    connector.events = [stored([keys[1]], "CPU"), AllBlocksCleared()]
    run(engine, reader, "e", 21_000, 1)
    assert reader.sets["any"] == reader.set


def test_a_reset_of_the_gpu_leaves_what_is_below(world):
    engine, connector, reader = world
    one = run(engine, reader, "a", 0, 4)
    connector.events = [stored(list(one.block_hashes), "CPU")]
    run(engine, reader, "b", 1000, 1)
    assert engine.scheduler.kv_cache_manager.reset_prefix_cache()
    run(engine, reader, "c", 3000, 1)
    assert reader.sets["any"] == reader.set | set(names(engine, one)[:4])


def test_vllm_gets_every_event_and_a_bad_one_does_no_harm(world):
    engine, connector, reader = world
    faults = engine.scheduler._kvatlas
    connector.events = events = [object(), stored([7.5], "CPU"), stored([b"short"], "CPU")]
    assert engine.scheduler.connector.take_events() == events
    assert engine.scheduler.connector.take_events() == []
    run(engine, reader, "a", 0, 2)
    assert reader.state["counters"]["faults"] == 1 and faults is not None


def test_connectors_that_say_nothing_are_named(model, caplog):
    engine = Engine(scheduler(model, blocks=40), 1)
    engine.scheduler.connector = Connector()
    tiers.follow(engine.scheduler, engine.scheduler._kvatlas)
    assert "--kv-events-config" in caplog.text
    engine.scheduler._kvatlas.stop()
