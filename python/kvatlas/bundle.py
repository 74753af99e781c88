"""The bundle: what the engine really uses to make token ids, as JSON. Its shape is written in picker/src/bundle.rs."""

from __future__ import annotations

import json
from typing import Any

from kvatlas import arguments
from kvatlas.facts import served_names


def export(vllm_config: Any) -> bytes:
    """The bundle of this engine. Loads the tokenizer a second time, as the API server loads it."""
    import vllm

    model = vllm_config.model_config
    tokenizer = _tokenizer(model)
    backend = getattr(tokenizer, "_tokenizer", None)
    doubt = None
    if tokenizer is None:
        doubt = "the engine was started without a tokenizer"
    elif not hasattr(backend, "to_str"):
        doubt = f"the tokenizer {type(tokenizer).__name__} has no fast backend"
    elif arguments.given("--config"):
        doubt = _config_file_doubt()
    templates = {} if tokenizer is None else _templates(tokenizer, model)
    bundle = {
        "format": 1,
        "engine_version": getattr(vllm, "__version__", ""),
        "model_type": getattr(model.hf_config, "model_type", ""),
        "models": served_names(model),
        "max_model_len": int(model.max_model_len),
        "tokenizer": backend.to_str() if backend is not None and hasattr(backend, "to_str") else {},
        "special_tokens": {} if tokenizer is None else _special(tokenizer),
        "chat_template": templates.pop("default", None),
        "chat_templates": templates,
        "content_format": arguments.value("--chat-template-content-format") or "auto",
        "default_chat_template_kwargs": json.loads(arguments.value("--default-chat-template-kwargs") or "{}"),
        "exclude_tools_when_tool_choice_none": arguments.given("--exclude-tools-when-tool-choice-none"),
        "truncation_side": getattr(tokenizer, "truncation_side", None),
        "not_exact": doubt,
    }
    return json.dumps(bundle, ensure_ascii=False).encode()


def _config_file_doubt() -> str | None:
    # Options that change a prompt may hide in the file; without them the file does not matter.
    path = arguments.value("--config")
    try:
        with open(path or "", encoding="utf-8") as file:
            text = file.read()
    except OSError:
        return "the --config file cannot be read by the agent"
    hidden = [name for name in ("chat-template", "default-chat-template-kwargs", "exclude-tools") if name in text.replace("_", "-")]
    return f"the --config file sets {', '.join(hidden)}" if hidden else None


def _tokenizer(model_config: Any) -> Any:
    try:
        from vllm.tokenizers import cached_tokenizer_from_config
    except ImportError:
        from vllm.transformers_utils.tokenizer import init_tokenizer_from_configs as cached_tokenizer_from_config
    return cached_tokenizer_from_config(model_config)


def _special(tokenizer: Any) -> dict[str, Any]:
    def plain(value: Any) -> Any:
        return [str(one) for one in value] if isinstance(value, (list, tuple)) else str(value)

    return {name: plain(value) for name, value in tokenizer.special_tokens_map.items() if value}


def _templates(tokenizer: Any, model_config: Any) -> dict[str, str]:
    """The template without tools as "default", and with them as "tool_use" where it is another one."""
    given = arguments.value("--chat-template")
    if given is not None:
        given = _load(given)

    def resolve(tools: Any) -> str | None:
        try:
            from vllm.renderers.hf import resolve_chat_template
        except ImportError:
            return given or tokenizer.get_chat_template(None, tools=tools)
        found: str | None = resolve_chat_template(tokenizer, given, tools, model_config=model_config)
        return found

    def attempt(tools: Any) -> str | None:
        try:
            return resolve(tools)
        except ValueError:
            return None  # a model without a chat template

    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    found = {"default": attempt(None), "tool_use": attempt([tool])}
    if found["tool_use"] == found["default"]:
        del found["tool_use"]
    return {name: template for name, template in found.items() if template is not None}


def _load(given: str) -> str:
    for place in ("vllm.renderers.chat_utils", "vllm.entrypoints.chat_utils"):
        try:
            module = __import__(place, fromlist=["load_chat_template"])
            return str(module.load_chat_template(given) or given)
        except (ImportError, AttributeError):
            continue
    return given
