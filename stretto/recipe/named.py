"""The names of the literature: points of the five questions, without logic.

Each function gives a `Recipe`; its docstring's first line says what it is, `stretto recipes` lists them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ParamSpec

from stretto.codecs import (
    Codec,
    censored,
    chain,
    chunked,
    difference_threshold,
    error_feedback,
    exact,
    low_rank,
    quantise,
    sign,
    threshold,
    top_k,
)
from stretto.codecs import deep_gradient_compression as masked_momentum
from stretto.recipe.recipe import Recipe
from stretto.recipe.then import (
    add,
    constant,
    equal_share,
    frozen_variance,
    inverse_staleness,
    mix,
    outer,
    pull,
    replace,
    step,
)
from stretto.recipe.then import delay_compensated as compensated
from stretto.recipe.what import gradient_differences, gradients, momenta, parameters, updates
from stretto.recipe.when import Every, on_arrival, together
from stretto.recipe.whom import neighbours, server
from stretto.spec import FieldError, literal, sentence, signature

P = ParamSpec("P")


def named(make: Callable[P, Recipe]) -> Callable[P, Recipe]:
    """Let the recipe print as the call that made it."""
    signature = inspect.signature(make)

    @functools.wraps(make)
    def made(*args: P.args, **kwargs: P.kwargs) -> Recipe:
        arguments = signature.bind(*args, **kwargs).arguments
        try:
            recipe = make(*args, **kwargs)
        except FieldError as error:
            raise _in_typed_words(error, make.__name__, arguments) from None
        options = ", ".join(f"{name}={literal(value)}" for name, value in arguments.items())
        object.__setattr__(recipe, "called", f"{make.__name__}({options})" if options else make.__name__)
        return recipe

    return made


def _in_typed_words(error: FieldError, name: str, arguments: Mapping[str, object]) -> FieldError:
    """Return the error of a field as one of the recipe's option that it was made from, where that is known."""
    candidates = [
        argument for argument, value in arguments.items() if value == error.value and type(value) is type(error.value)
    ]
    candidates.sort(key=lambda argument: (argument != error.field, not argument.endswith(error.field)))
    return error.renamed(candidates[0], name) if candidates else error


@named
def allreduce(how: Codec = exact()) -> Recipe:
    """Exchange the gradient in every backward pass: one machine with the joined batch, to rounding.

    `g = sum_i (n_i / n) g_i`
    """
    return Recipe(what=gradients(), when=together(), how=how, then=step())


@named
def local_sgd(
    every: Every = 16,
    optimizer_state: str = "keep",
    after: int = 0,
    how: Codec = exact(),
) -> Recipe:
    """Train alone for `every` steps, then replace the parameters by their mean (parameter averaging).

    `theta = sum_i (n_i / n) theta_i`; with `after=n` the workers average at every step until step n.
    """
    what = parameters(optimizer_state)  # type: ignore[arg-type]
    return Recipe(what=what, when=together(every=every, after=after), how=how, then=replace())


@named
def diloco(
    every: Every = 500,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    how: Codec = exact(),
) -> Recipe:
    """Train alone for `every` steps, then step an outer Nesterov SGD with the mean change (DiLoCo).

    `d = sum_i (n_i / n) (theta_old - theta_i);  theta = Nesterov(theta_old, d)`
    """
    then = outer(lr=outer_lr, momentum=outer_momentum)
    return Recipe(what=updates(), when=together(every=every), how=how, then=then)


@named
def gossip(every: int = 1, graph: str = "ring") -> Recipe:
    """Train alone for `every` steps, then mix the parameters with those of the neighbours in a graph (D-PSGD).

    `x_i = sum_j W_ij x_j`, with equal weights; no worker exchanges with all. The mean of all x_i is evaluated.
    """
    whom = neighbours(graph)  # type: ignore[arg-type]
    return Recipe(what=parameters(), when=together(every=every), whom=whom, then=mix())


@named
def async_sgd(weight: float = 1.0, shards: int = 1, overlap: bool = False, how: Codec = exact()) -> Recipe:
    """Send the change of every step to a server, which adds it as it comes (asynchronous SGD).

    `theta += c * D_i`, with D_i computed on parameters that are t versions old: about N - 1 with equal workers.
    """
    when = on_arrival(overlap=overlap)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=add(constant(weight)))


@named
def downpour(
    every: int = 5, weight: float = 1.0, shards: int = 1, overlap: bool = False, how: Codec = exact()
) -> Recipe:
    """Train alone for `every` steps, then send the change to a server, which adds it as it comes (Downpour SGD).

    `theta += c * (theta_i - theta_old)`
    """
    when = on_arrival(every=every, overlap=overlap)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=add(constant(weight)))


@named
def staleness_aware(collect: int = 1, shards: int = 1, overlap: bool = False, how: Codec = exact()) -> Recipe:
    """Asynchronous SGD that weighs each update by the inverse of its staleness.

    `theta += (1/s) sum_l D_l / max(t_l, 1)` over the s updates that are collected
    """
    when = on_arrival(collect=collect, overlap=overlap)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=add(inverse_staleness()))


@named
def soft_sync(collect: int = 2, shards: int = 1, overlap: bool = False, how: Codec = exact()) -> Recipe:
    """Apply the mean of the first `collect` updates that are there, whosever they are (soft synchronisation).

    `theta += (1/s) sum_l D_l`; n-softsync of N workers collects s = N / n.
    """
    when = on_arrival(collect=collect, overlap=overlap)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=add())


@named
def stale_synchronous(bound: int = 4, shards: int = 1, overlap: bool = False, how: Codec = exact()) -> Recipe:
    """Asynchronous SGD in which a worker `bound` rounds ahead of the slowest is made to wait (SSP).

    `theta += D_i / N`: one round of all workers adds up to their mean, and a bound of 0 is the barrier.
    """
    when = on_arrival(bound=bound, overlap=overlap)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=add(equal_share()))


@named
def elastic_averaging(
    every: int = 10, alpha: float = 0.1, shards: int = 1, overlap: bool = False, how: Codec = exact()
) -> Recipe:
    """Every `every` steps pull a worker and the server's parameters towards each other (elastic averaging SGD).

    `e = alpha * (x_i - c);  x_i -= e;  c += e`; the server's c is the model that is evaluated.
    """
    when = on_arrival(every=every, overlap=overlap)
    return Recipe(what=parameters(), when=when, whom=server(shards), how=how, then=pull(alpha))


@named
def delay_compensated(
    lam: float = 2.0, m: float = 0.95, adaptive: bool = True, shards: int = 1, overlap: bool = False
) -> Recipe:
    """Asynchronous SGD whose server corrects each update for what has changed since (DC-ASGD).

    `theta -= lr * (g + lambda * g * g * (theta - theta_old))`, with g the update divided by -lr: the gradient itself
    with plain SGD.
    """
    then = add(compensated(lam=lam, m=m, adaptive=adaptive))
    return Recipe(what=updates(), when=on_arrival(overlap=overlap), whom=server(shards), then=then)


@named
def async_diloco(
    every: int = 500,
    outer_lr: float = 0.7,
    outer_momentum: float = 0.9,
    shards: int = 1,
    overlap: bool = False,
    how: Codec = exact(),
) -> Recipe:
    """Train alone for `every` steps, then let the server step an outer SGD with delayed Nesterov momentum.

    `d = theta_old - theta_i;  theta -= lr * d / N, and every N-th time the momentum too`
    """
    when, then = on_arrival(every=every, overlap=overlap), outer(lr=outer_lr, momentum=outer_momentum)
    return Recipe(what=updates(), when=when, whom=server(shards), how=how, then=then)


@named
def gd_sec(xi: float = 100.0, beta: float = 0.01, groups: int = 1) -> Recipe:
    """Send only those components of the gradient that changed by more than the parameters' move excuses (GD-SEC).

    `D_m = g_m - h_m + e_m`; sent where `|D_m| > (xi / M) |theta^k - theta^(k-1)|`. With minibatches it is SGD-SEC. Keep
    `lr * beta * xi <= 1`: xi is in units of the gradient's change by the parameters' (the smoothness L).
    """
    how = error_feedback(difference_threshold(xi))
    return Recipe(what=gradient_differences(beta, groups), how=how, then=step())


@named
def gd_soec(xi: float = 100.0, beta: float = 0.01, groups: int = 1) -> Recipe:
    """GD-SEC without error correction: components that are not sent enter no residual.

    `D_m = g_m - h_m`
    """
    return Recipe(what=gradient_differences(beta, groups), how=difference_threshold(xi), then=step())


@named
def quantised_gd_sec(xi: float = 100.0, beta: float = 0.01, bits: int = 8, groups: int = 1) -> Recipe:
    """GD-SEC whose surviving components are rounded to a few bits as well (QSGD-SEC).

    What rounding leaves out stays in e_m.
    """
    how = error_feedback(chain(difference_threshold(xi), quantise(bits)))  # type: ignore[arg-type]
    return Recipe(what=gradient_differences(beta, groups), how=how, then=step())


@named
def censoring(xi: float = 1.0) -> Recipe:
    """Send the whole gradient or nothing: nothing while it changed less than the parameters' move excuses (CGD).

    `|g_m - h_m| > (xi / M) |theta^k - theta^(k-1)|`, with h_m the gradient sent last
    """
    return Recipe(what=gradient_differences(1.0), how=censored(xi), then=step())


@named
def ef21(how: Codec = top_k(0.01)) -> Recipe:
    """Send the compressed difference between the gradient and a state that both sides keep (EF21).

    `h_m += C(g_m - h_m)`; all step with the sum of the h_m.
    """
    return Recipe(what=gradient_differences(1.0), how=how, then=step())


@named
def gradient_sharing(tau: float = 1e-3, every: Every = 1) -> Recipe:
    """Send only which components of the update have reached a threshold, and their sign (gradient sharing).

    `r += D_i`; where `|r| >= tau` send `+-tau` and take it from r. tau adapts, so that 0.01% to 1% are sent.
    """
    how = error_feedback(threshold(tau, adaptive=True))
    return Recipe(what=updates(), when=together(every=every), how=how, then=add())


@named
def deep_gradient_compression(ratio: float = 0.001, momentum: float = 0.9, warm_up: int = 0) -> Recipe:
    """Send the 0.1% of the accumulated velocity that is largest; momentum lives in the codec, the optimizer has none.

    `u = m u + g;  v += u`; send the largest of v, and set u = v = 0 there.
    """
    return Recipe(how=masked_momentum(ratio, momentum, warm_up))


@named
def one_bit(warm_up: int = 100, beta: float = 0.9) -> Recipe:
    """Adam that exchanges the sign of its momentum, once its variance is good enough to be frozen (1-bit Adam).

    `m = beta m + (1 - beta) g_i`, exchanged as signs and one mean with a residual; `theta -= lr m / (sqrt(v) + eps)`
    """
    how = error_feedback(sign(means="one"))
    return Recipe(what=momenta(warm_up, beta), how=how, then=frozen_variance())


@named
def power_sgd(rank: int = 4) -> Recipe:
    """Exchange the gradient of each matrix as two thin ones, found by one step of power iteration (PowerSGD).

    `P = orthonormal(mean(M Q));  Q = mean(M^T P);  g = P Q^T`, with M the gradient plus the residual
    """
    return Recipe(how=error_feedback(low_rank(rank)))


@named
def sparse_loco(
    every: Every = 30,
    chunk: int = 4096,
    k: int = 64,
    bits: int = 2,
    decay: float = 0.95,
    outer_lr: float = 1.0,
) -> Recipe:
    """Train alone for `every` steps, then exchange the largest of each chunk of the change in 2 bits (SparseLoCo).

    `a = b e + D_i`; send C(a), the k largest of each chunk; `e = a - C(a);  theta = theta_old + alpha mean C(a)`
    """
    how = error_feedback(chunked(chunk, k, bits), decay=decay)  # type: ignore[arg-type]
    return Recipe(what=updates(), when=together(every=every), how=how, then=add(constant(outer_lr)))


SYNCHRONOUS = (allreduce, local_sgd, diloco, gossip)
FEWER_BYTES = (
    gd_sec,
    gd_soec,
    quantised_gd_sec,
    censoring,
    ef21,
    gradient_sharing,
    deep_gradient_compression,
    one_bit,
    power_sgd,
    sparse_loco,
)
ASYNCHRONOUS = (
    async_sgd,
    downpour,
    staleness_aware,
    soft_sync,
    stale_synchronous,
    elastic_averaging,
    delay_compensated,
    async_diloco,
)
NAMED: dict[str, Callable[..., Recipe]] = {make.__name__: make for make in (*SYNCHRONOUS, *FEWER_BYTES, *ASYNCHRONOUS)}


@dataclass(frozen=True)
class Entry:
    """Properties of a named recipe, read from its function."""

    name: str
    sentence: str
    signature: str
    words: dict[str, str]
    papers: tuple[str, ...]


def catalogue() -> list[Entry]:
    """Return all named recipes with their five default answers, for lists and tables."""
    return [_entry(make) for make in NAMED.values()]


def _entry(make: Callable[..., Recipe]) -> Entry:
    recipe = make()
    return Entry(make.__name__, sentence(make), signature(make), recipe.words(), recipe.sources())


def markdown_table(entries: Sequence[Entry]) -> str:
    """Return the recipes as a Markdown table of two columns, which fit beside each other on a page."""
    head = ["recipe, what it does, and papers", "what, when, whom, how, then"]
    rows = [
        [
            "<br>".join(filter(None, [f"`{entry.signature}`", entry.sentence, "; ".join(entry.papers)])),
            "<br>".join(f"`{word}`" for word in entry.words.values()),
        ]
        for entry in entries
    ]
    return "\n".join(f"| {' | '.join(row)} |" for row in [head, ["---"] * len(head), *rows])
