"""Let file options take several files, as a shell expands a pattern such as ``corpus/*.txt``."""

from __future__ import annotations

from collections.abc import Sequence

_TAKE_SEVERAL = ("--data", "--data-sets", "--haystack", "--qa", "--include")
_ARGUMENTS = (".yaml", ".yml")  # recipes and layouts: always arguments of the command


def name_each(arguments: Sequence[str]) -> list[str]:
    """Repeat an option before each file that follows it: ``--data a b`` becomes ``--data a --data b``.

    This holds for ``--data`` and the other options that take files, up to the next option. Recipes and layouts (YAML)
    stay arguments of the command.
    """
    expanded: list[str] = []
    option, has_value = "", False
    for number, word in enumerate(arguments):
        if word == "--":  # only arguments follow
            return [*expanded, *arguments[number:]]
        # Options end the list of files, unless one still lacks its value
        if word.startswith("-") and not (option and not has_value):
            option, has_value = word if word in _TAKE_SEVERAL else "", False
        elif option and not has_value:
            has_value = True
        elif option and not word.lower().endswith(_ARGUMENTS):
            expanded.append(option)
        else:
            option = ""
        expanded.append(word)
    return expanded
