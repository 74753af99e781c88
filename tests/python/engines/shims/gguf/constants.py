"""As much of gguf.constants as vLLM names at import."""


class Keys:
    pass


class VisionProjectorType:
    pass
