"""What a shell completes beside verbs and options: names of the catalog, frameworks, keys of a plan.

Each function is handed what is typed so far; typer keeps those of the names that begin so.
"""

import os


def models(incomplete: str) -> list[str]:
    """Presets."""
    from meshwise.model.find import model_names

    return model_names()


def clusters(incomplete: str) -> list[str]:
    """Presets, and chips, behind which their number comes."""
    from meshwise.machine.hardware import chips, cluster_names

    return [*cluster_names(), *(f"{chip}:" for chip in chips())]


def machines(incomplete: str) -> list[str]:
    """Clusters, or a chip alone."""
    return [name.removesuffix(":") for name in clusters(incomplete)]


def frameworks(incomplete: str) -> list[str]:
    """Frameworks that settings are written for."""
    from meshwise.api import RL_FRAMEWORKS
    from meshwise.launch.settings import FRAMEWORKS

    return [*FRAMEWORKS, *RL_FRAMEWORKS]


def methods(incomplete: str) -> list[str]:
    """Methods of fine-tuning."""
    from meshwise.search.fit_card import METHODS

    return list(METHODS)


def plans(incomplete: str) -> list[str]:
    """The plan so far with the next key, or with a value of the last one where its values have names."""
    from meshwise.plan.plan import KEYS

    start, _, last = incomplete.rpartition(",")
    start += "," if start else ""
    key, equals, value = last.partition("=")
    if not equals:
        return [f"{start}{name}=" for name in KEYS]
    before, _, value = value.rpartition("|")
    before += "|" if before else ""
    return [f"{start}{key}={before}{name}" for name in (KEYS[key].names if key in KEYS else ())]


def join_words_of_bash() -> int:
    """bash breaks words at `=` and `:`; make `--plan tp=8,pp` one word again before typer reads them.

    How many characters of a completion bash has already, in the words before its last.
    """
    words, last = os.environ["COMP_WORDS"].split(), int(os.environ["COMP_CWORD"])
    words += [""] * (last + 1 - len(words))
    first = last
    while first > 1 and (words[first] in ("=", ":") or words[first - 1] in ("=", ":")):
        first -= 1
    joined = [*words[:first], "".join(words[first : last + 1])]
    os.environ |= {"COMP_WORDS": " ".join(joined), "COMP_CWORD": str(first)}
    return len("".join(words[first : last + (words[last] in ("=", ":"))]))
