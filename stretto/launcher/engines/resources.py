"""Resources that an engine reserves for each worker, from the text of `--resources`."""

from __future__ import annotations

from stretto.call_syntax import Words
from stretto.units import PLAIN, spelled

DEFAULT = "1 CPU"
EXAMPLE = "1 GPU, 4 CPU"
EXPECTED = "a number and the name of a resource, such as CPU or GPU"
NAMES = {"cpu": "CPU", "cpus": "CPU", "gpu": "GPU", "gpus": "GPU"}


def parse(text: str | None) -> dict[str, float]:
    """Return the amount of each resource; without a text those of the default.

    >>> parse("1 GPU, 4 cpus, 0.5 fast_disk"), parse(None)
    ({'GPU': 1.0, 'CPU': 4.0, 'fast_disk': 0.5}, {'CPU': 1.0})

    Raise LaunchError for any other text.
    """
    words = Words(text if text is not None else DEFAULT, "--resources", EXAMPLE, EXPECTED)
    found: dict[str, float] = {}
    for _ in words.listed(","):
        at = words.at
        amount, name = words.quantity(PLAIN), words.next
        if amount <= 0:
            raise words.refused("an amount above 0", at)
        if not name[:1].isalpha():
            raise words.refused()
        if NAMES.get(name.lower(), name) in found:
            raise words.refused("each resource once")
        found[NAMES.get(name.lower(), name)] = amount
        words.at += 1
    return found


def described(resources: dict[str, float]) -> str:
    """Return the text of resources.

    >>> described({"GPU": 1.0, "CPU": 0.5})
    '1 GPU, 0.5 CPU'
    """
    return ", ".join(f"{spelled(amount)} {name}" for name, amount in resources.items())
