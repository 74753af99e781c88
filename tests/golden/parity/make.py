"""What vLLM itself makes of the bodies in bodies.jsonl: the expected text and token ids.

    python make.py MODEL_DIRECTORY

needs vLLM 0.32 and a model folder of the demo (tokenizer and config.json; no weights are read). Writes
expected/chatml.jsonl (the demo's own template: text and ids) and one file of texts for each template in templates/.
bodies.jsonl is data, written by hand; its bodies are kept as text, so that odd JSON stays odd.
"""

import asyncio
import json
import os
import pathlib
import sys

os.environ.update(HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1", VLLM_TARGET_DEVICE="cpu")
os.environ.update(VLLM_LOGGING_LEVEL="ERROR", TRANSFORMERS_VERBOSITY="error", VLLM_CPU_KVCACHE_SPACE="1")

from vllm import AsyncEngineArgs  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest  # noqa: E402
from vllm.entrypoints.openai.completion.protocol import CompletionRequest  # noqa: E402
from vllm.entrypoints.serve.engine.protocol import ErrorResponse  # noqa: E402
from vllm.renderers import renderer_from_config  # noqa: E402
from vllm.renderers.online_renderer import OnlineRenderer  # noqa: E402

HERE = pathlib.Path(__file__).parent


async def rendered(renderer: OnlineRenderer, body: dict) -> dict:
    try:
        if "messages" in body:
            result = await renderer.render_chat(ChatCompletionRequest(**body))
        else:
            result = await renderer.render_completion(CompletionRequest(**body))
        if isinstance(result, ErrorResponse):
            return {"status": "error"}
        inputs = result[1] if "messages" in body else result
        return {"status": "ok", "text": inputs[0].get("prompt"), "ids": list(inputs[0]["prompt_token_ids"])}
    except Exception:
        return {"status": "error"}


async def main() -> None:
    model = AsyncEngineArgs(model=sys.argv[1]).create_model_config()
    model.quantization = None
    renderer = OnlineRenderer(
        model_config=model,
        renderer=renderer_from_config(VllmConfig(model_config=model)),
        request_logger=None,
        chat_template=None,
        chat_template_content_format="auto",
        enable_auto_tools=True,
        tool_parser="hermes",
    )
    source = pathlib.Path(sys.argv[2]) if len(sys.argv) > 2 else HERE / "bodies.jsonl"
    out = pathlib.Path(sys.argv[3]) if len(sys.argv) > 3 else HERE / "expected"
    lines = source.read_text().strip("\n").split("\n")
    templates = {"chatml": None} | {path.stem: path.read_text() for path in sorted((HERE / "templates").glob("*.jinja"))}
    for name, template in templates.items():
        renderer.chat_template = template
        with (out / f"{name}.jsonl").open("w") as file:
            for line in lines:
                case = json.loads(line)
                if template and "messages" not in case["body"]:
                    continue
                result = await rendered(renderer, case["body"])
                if template:
                    result.pop("ids", None)
                file.write(json.dumps({"id": case["id"], **result}, ensure_ascii=False) + "\n")


asyncio.run(main())
