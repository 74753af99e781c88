"""Stands in for gguf, which vLLM 0.12 to 0.20 imports for the names of its types: enough to import, nothing to use."""


class GGMLQuantizationType:
    pass


class GGUFReader:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ImportError("gguf is not installed here: this is a stand-in for its name")
