"""Stands in for diskcache, which vLLM up to 0.11 imports for its grammar cache: enough to import, nothing to use."""


class Cache:
    def __init__(self, *args: object, **kwargs: object) -> None:
        raise ImportError("diskcache is not installed here: this is a stand-in for its name")
