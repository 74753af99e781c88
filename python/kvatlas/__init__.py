"""The kvatlas agent for vLLM: publishes what the engine's KV cache holds.

vLLM loads :func:`register` by the entry point ``vllm.general_plugins``. Settings are environment variables named
``KVATLAS_*``; see the README.
"""

from kvatlas._agent import __version__
from kvatlas.plugin import register

__all__ = ["__version__", "register"]
