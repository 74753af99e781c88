"""vLLM's command line, where the engine's own configuration does not carry it: a few options of the API server.

A forked or spawned engine has its parent's ``sys.argv``.
"""

from __future__ import annotations

import sys


def values(option: str) -> list[str]:
    """The words that follow an option (``--a b c`` or ``--a=b``), the last time that it is given."""
    found: list[str] = []
    taking = False
    for word in sys.argv[1:]:
        name, equals, value = word.partition("=")
        if name.startswith("--") or (name.startswith("-") and name[1:2].isalpha()):
            taking = name.replace("_", "-") == option
            if taking:
                found = [value] if equals else []
        elif taking:
            found.append(word)
    return found


def value(option: str) -> str | None:
    """The first word that follows an option, if it is given."""
    words = values(option)
    return words[0] if words else None


def given(option: str) -> bool:
    """Is the option on the command line?"""
    return any(word.partition("=")[0].replace("_", "-") == option for word in sys.argv[1:])
