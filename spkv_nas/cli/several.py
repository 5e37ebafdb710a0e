"""Let options that take files be followed by several of them, as a shell writes a pattern such as ``corpus/*.txt``."""

from __future__ import annotations

from collections.abc import Sequence

_TAKE_SEVERAL = ("--data", "--haystack", "--qa", "--include")
_ARGUMENTS = (".yaml", ".yml")  # recipes and layouts, which no option of these takes


def name_each(arguments: Sequence[str]) -> list[str]:
    """Repeat ``--data`` and its like before each file that follows: ``--data a b`` becomes ``--data a --data b``.

    Files follow up to the next option. Recipes and layouts stay arguments of the command.
    """
    named: list[str] = []
    option, has_value = "", False
    for number, word in enumerate(arguments):
        if word == "--":  # arguments alone come after it
            return [*named, *arguments[number:]]
        if word.startswith("-") and not (option and not has_value):
            option, has_value = word if word in _TAKE_SEVERAL else "", False
        elif option and not has_value:
            has_value = True
        elif option and not word.lower().endswith(_ARGUMENTS):
            named.append(option)
        else:
            option = ""
        named.append(word)
    return named
