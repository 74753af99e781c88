"""As much of gguf.quants as vLLM names at import."""

from gguf import GGMLQuantizationType

__all__ = ["GGMLQuantizationType"]
