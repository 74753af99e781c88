"""Models whose hits are compared, as far as a version knows them."""

from engine import EAGLE_GROUPS, VERSION, Case, Group


def full(block: int = 16, heads: int = 1, eagle: bool = False) -> Group:
    return Group("full", block, heads=heads, eagle=eagle)


def window(span: int, block: int = 16, eagle: bool = False) -> Group:
    return Group("window", block, span, eagle=eagle)


def chunk(span: int) -> Group:
    return Group("chunk", 16, span)


def mamba(mode: str, block: int = 16) -> Group:
    return Group("mamba", block, mode=mode)


def cases() -> list[Case]:
    out = []
    for eagle in (False, True):
        mark = "+eagle" if eagle else ""

        def add(name: str, *groups: Group, unit: int = 0, mark: str = mark, eagle: bool = eagle) -> None:
            out.append(Case(name + mark, groups, eagle, unit))

        add("full", full())
        add("window40", window(40))
        for span in (1, 16, 33, 40, 128):
            if span == 1 and eagle and VERSION < (0, 14):
                continue  # this engine gives its null block a key: the only block of the window is gone before it is full
            add(f"full+window{span}", full(), window(span))
        add("full+2*window40", full(), window(40), window(40))
        if not eagle:
            for span in (64, 24):
                add(f"full+chunk{span}", full(), chunk(span))
        if VERSION >= (0, 14):
            add("full+window40+window100", full(), window(40), window(100))
            add("full+other-full+window40", full(), full(heads=2), window(40))
            add("window40+window100", window(40), window(100))
        # Sizes that differ: with EAGLE the engine itself fails an assertion up to 0.18.
        if VERSION >= (0, 12) and (not eagle or VERSION >= (0, 19)):
            add("full16+window32:40", full(), window(40, 32))
            add("full32+window16:40", full(32), window(40))
            add("full32+window16:100", full(32), window(100))
            if VERSION >= (0, 14):
                add("full32+window16:40+window16:100", full(32), window(40), window(100))
        states = []
        if (0, 11) <= VERSION < (0, 33):
            states.append("all")
        if VERSION >= (0, 15):
            states.append("align")
        for mode in states:
            add(f"full+mamba-{mode}", full(), mamba(mode))
            if VERSION >= (0, 14):
                add(f"full+window40+mamba-{mode}", full(), window(40), mamba(mode))
        if "all" in states and VERSION >= (0, 12):
            add("full16+mamba64-all", full(), mamba("all", 64))
        if VERSION >= (0, 24):
            add("full64+mamba64-align/16", full(64), mamba("align", 64), unit=16)
            add("full16+mamba64-align/16", full(), mamba("align", 64), unit=16)
        if VERSION >= (0, 26):
            add("full64+2*mamba64-align/16", full(64), mamba("align", 64), mamba("align", 64), unit=16)
            add("full32+mamba64-align+window16:40/16", full(32), mamba("align", 64), window(40), unit=16)
    if EAGLE_GROUPS:
        for name, groups in {
            "full+window40E": (full(), window(40, eagle=True)),
            "fullE+window40": (full(eagle=True), window(40)),
            "full+window40E+window100": (full(), window(40, eagle=True), window(100)),
            "full+window40E+window100E": (full(), window(40, eagle=True), window(100, eagle=True)),
            "full+other-fullE+window40": (full(), full(heads=2, eagle=True), window(40)),
        }.items():
            out.append(Case(name, groups, eagle=True))
    if VERSION >= (0, 33):
        for ahead in (1, 3):
            for name, groups in {
                "full": (full(),),
                "full+window40": (full(), window(40)),
                "full+mamba-align": (full(), mamba("align")),
            }.items():
                out.append(Case(f"{name}+eagle/ahead{ahead}", groups, eagle=True, ahead=ahead))
    return out
