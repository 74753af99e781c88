"""The official OpenAI client, told what to send.

    python drive.py BASE_URL

Reads one JSON object a line: {"id", "kind": "chat" | "completion", "body"}; sends each at once, any number of them
at a time, and writes one line when its answer is whole: {"id", "status", "answer" | "error", "ms"}. It ends with its
input. A body with "stream": true is read as a stream and answered with the joined chunks.
"""

import asyncio
import json
import sys
import time

import openai

# An engine on a busy machine may take its time; nothing here is tried twice, so that a failed request shows.
CLIENT = openai.AsyncOpenAI(base_url=sys.argv[1], api_key="none", timeout=300, max_retries=0)


async def whole(create, body: dict) -> dict:
    response = await create(**body)
    return response.model_dump()


async def streamed(create, body: dict) -> dict:
    """The chunks joined into what the unstreamed answer would have been, as far as the harness reads it."""
    answer = {"choices": [{"text": "", "token_ids": []}]}
    async for event in await create(**body):
        chunk = event.model_dump()
        answer["id"] = chunk["id"]
        answer["usage"] = chunk.get("usage") or answer.get("usage")
        if chunk.get("prompt_token_ids"):
            answer["prompt_token_ids"] = chunk["prompt_token_ids"]
        for choice in chunk["choices"]:
            if choice.get("prompt_token_ids"):
                answer["prompt_token_ids"] = choice["prompt_token_ids"]
            text = choice["text"] if "text" in choice else (choice["delta"].get("content") or "")
            answer["choices"][0]["text"] += text
            answer["choices"][0]["token_ids"] += choice.get("token_ids") or []
    return answer


async def send(order: dict) -> None:
    begun = time.monotonic()
    result = {"id": order["id"], "status": 200}
    try:
        create = CLIENT.chat.completions.create if order["kind"] == "chat" else CLIENT.completions.create
        body = order["body"]
        # Fields that are vLLM's own go the way that the client has for them.
        known = {"model", "messages", "prompt", "max_tokens", "temperature", "stream", "stream_options"}
        body = {k: v for k, v in body.items() if k in known} | {
            "extra_body": {k: v for k, v in body.items() if k not in known}
        }
        result["answer"] = await (streamed if body.get("stream") else whole)(create, body)
    except openai.APIStatusError as error:
        result |= {"status": error.status_code, "error": error.response.text}
    except Exception as error:  # whatever it is, the harness counts it as a failed request and shows it
        result |= {"status": 0, "error": repr(error)}
    result["ms"] = (time.monotonic() - begun) * 1000
    print(json.dumps(result), flush=True)


async def main() -> None:
    lines = asyncio.StreamReader(limit=1 << 24)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    async with asyncio.TaskGroup() as tasks:
        while line := await lines.readline():
            tasks.create_task(send(json.loads(line)))


if __name__ == "__main__":
    asyncio.run(main())
