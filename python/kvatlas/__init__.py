"""The kvatlas agent for vLLM: publishes what the engine's KV cache holds.

vLLM loads :func:`register` by the entry point ``vllm.general_plugins``. Settings are environment variables named
``KVATLAS_*``; see the README. ``python -m kvatlas doctor`` says whether it fits here.
"""

from __future__ import annotations

import logging

__all__ = ["__version__", "register"]


def register() -> None:
    """The entry point. Never raises: vLLM would not catch it."""
    try:
        from kvatlas.plugin import register as patch
    except Exception:
        log = logging.getLogger("vllm.plugins.kvatlas")
        log.exception("kvatlas is off: it does not load here; `python -m kvatlas doctor` says why")
    else:
        patch()


def __getattr__(name: str) -> str:
    # Not read at import, so that the doctor can run where the native part does not load.
    if name == "__version__":
        from kvatlas._agent import __version__

        return __version__
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
