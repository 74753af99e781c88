"""Prompt embeddings are in the names of blocks: equal ones are hit, others never, and predictions are right."""

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request
from world import Engine, Reader, hasher, request, scheduler


def embedded(id: str, rows: torch.Tensor, max_tokens: int = 1) -> Request:
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    params.update_from_generation_config({}, None)
    return Request(id, None, params, None, block_hasher=hasher, prompt_embeds=rows)


def test_equal_embeddings_are_hit_and_others_are_not(model):
    engine = Engine(scheduler(model, blocks=200), 1)
    agent = engine.scheduler._kvatlas
    reader = Reader(agent)
    torch.manual_seed(0)
    rows, others = torch.rand(84, 4), torch.rand(84, 4)
    tail = torch.cat([rows[:50], others[:34]])
    asked = [embedded("a", rows), embedded("b", tail), embedded("c", others), embedded("d", rows), embedded("e", tail)]
    # Ids that stand for the rows are all 0: a prompt of such ids is another prompt.
    for one in [*asked, request("ids", [0] * 84, max_tokens=1), embedded("long", rows, max_tokens=40)]:
        engine.scheduler.add_request(one)
        while engine.scheduler.requests:
            output = engine.scheduler.schedule()
            ids = list(output.num_scheduled_tokens)
            from vllm.v1.outputs import ModelRunnerOutput

            live = [engine.scheduler.requests[id] for id in ids]
            sampled = [[7] if r.num_computed_tokens >= r.num_tokens else [] for r in live]
            engine.scheduler.update_from_output(
                output, ModelRunnerOutput(req_ids=ids, req_id_to_index={id: i for i, id in enumerate(ids)}, sampled_token_ids=sampled)
            )
            engine.steps += 1
    reader.read(lambda r: r.state is not None and r.state["steps"] == engine.steps)
    started = {life["id"]: life for event, life in reader.lives if event == "started"}
    delivered = {id: engine.delivered[id] for id in started}
    assert delivered == {"a": 0, "b": 48, "c": 0, "d": 80, "e": 80, "ids": 0, "long": 80}
    assert {id: life["predicted_tokens"] for id, life in started.items()} == delivered
    # 5 blocks each of a and c, 2 more of b, 5 of the ids; what "long" generated behind its rows has no name.
    assert len(reader.set) == 17
    assert reader.state["unnamed"] == 2 and reader.state["counters"]["faults"] == 0
    reader.close()
    agent.stop()
