"""How a model is divided into fragments."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from thinwire.errors import ConfigError
from thinwire.fronts.local_sgd.fragment import Averaged


def layer_of(name: str) -> str:
    """Return the layer of a parameter or buffer, by its name.

    That is the numbered block it is in, of several the outermost one, and else the module that has it.

    Examples:
        >>> [layer_of(name) for name in ("blocks.3.mlp.0.weight", "embed.tokens.weight", "scale")]
        ['blocks.3', 'embed.tokens', 'scale']
    """
    parts = name.split(".")
    numbered = next((place for place, part in enumerate(parts) if part.isdecimal()), None)
    if numbered is not None and numbered < len(parts) - 1:
        return ".".join(parts[: numbered + 1])
    return name.rpartition(".")[0] or name


def fragments_of(averaged: Sequence[Averaged], num_fragments: int) -> list[list[Averaged]]:
    """Deal out the layers of a model: about as many bytes to each fragment, and layers from all depths.

    The largest layers go first, each to the fragment that has least; so it is decided how many layers of
    each size a fragment gets. Which of them is decided in the order of the model, the fragments in turn.
    (The strided fragments of Streaming DiLoCo, arXiv 2501.18512, with bytes balanced.)
    """
    layers = defaultdict(list)
    for each in averaged:
        layers[layer_of(each.name)].append(each)
    by_bytes = defaultdict(list)
    for name, members in layers.items():
        # Of whole parameters: the shards of a model must be divided alike.
        by_bytes[sum(each.tensor.nbytes for each in members)].append(name)
    num_layers = sum(len(names) for nbytes, names in by_bytes.items() if nbytes)
    if num_fragments > num_layers:
        raise ConfigError(
            f"fragments={num_fragments} is more than the layers that the model trains, {num_layers} "
            f"({', '.join(list(layers)[:4])} …); a layer is averaged as a whole, so take at most as many"
        )
    held = [0] * num_fragments  # bytes
    fragment_of: dict[str, int] = {}
    for nbytes, names in sorted(by_bytes.items(), reverse=True):
        share: Counter[int] = Counter()
        for _ in names:
            lightest = held.index(min(held))
            held[lightest] += nbytes
            share[lightest] += 1
        # The order of the model, so that layers next to each other come into different fragments.
        dealt: Counter[int] = Counter()
        for place, name in enumerate(names, start=1):
            behind = {f: place * share[f] / len(names) - dealt[f] for f in share if dealt[f] < share[f]}
            fragment_of[name] = max(behind, key=lambda f: (behind[f], -f))
            dealt[fragment_of[name]] += 1
    fragments: list[list[Averaged]] = [[] for _ in range(num_fragments)]
    for each in averaged:
        fragments[fragment_of[layer_of(each.name)]].append(each)
    return fragments
