"""Properties of recipes that send few bytes: GD-SEC, EF21, 1-bit Adam, encoded replies, the counting of traffic."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from combinations import each_value
from thread_workers import flat, regression, relative_distance, run_workers, small_net, training
from torch import Tensor, nn
from torch.utils.data import DataLoader

import stretto
from stretto import api
from stretto.codecs import CodecContext, difference_threshold, error_feedback, exact, top_k
from stretto.codecs.conformance import hold
from stretto.errors import ModelError, NotFiniteError, RecipeError
from stretto.events import read_events
from stretto.recipe.parser import parse
from stretto.recipe.what import DifferencesState, gradient_differences
from stretto.strategies import carried_state
from stretto.training.recipe_warnings import advice

DOUBLE = torch.float64


class Rounds:
    """M workers that exchange gradient differences of n numbers, with a step of theta after each exchange."""

    def __init__(self, beta: float, how: Any, workers: int = 3, n: int = 40, groups: int = 1) -> None:
        self.what, self.how, self.workers, self.n = gradient_differences(beta, groups), how, workers, n
        self.source = torch.Generator().manual_seed(7)
        self.theta = [torch.randn(n, generator=torch.Generator().manual_seed(0), dtype=DOUBLE) for _ in range(workers)]
        self.states: list[DifferencesState] = [
            self.what.init_state(how, theta, CodecContext(worker, workers, theta=theta))
            for worker, theta in enumerate(self.theta)
        ]
        self.sent_bytes: list[list[int]] = []

    def gradient(self) -> Tensor:
        return torch.randn(self.n, generator=self.source, dtype=DOUBLE)

    def round(self, gradients: list[Tensor], lr: float = 0.1) -> Tensor:
        coroutines = [self.what.average(self.how, x.clone(), m) for x, m in zip(gradients, self.states, strict=True)]
        results, messages = hold(coroutines)
        assert all(torch.equal(result, results[0]) for result in results)
        self.sent_bytes.append([message.tensor.nbytes for message in messages[0]])
        for theta in self.theta:
            theta.sub_(results[0], alpha=lr)
        return results[0]


@pytest.mark.parametrize("beta", [0.0, 0.01, 0.3, 1.0])
def test_without_a_threshold_gd_sec_is_gradient_descent(beta: float) -> None:
    rounds = Rounds(beta, error_feedback(difference_threshold(0)))
    for _ in range(20):
        given = [rounds.gradient() for _ in range(3)]
        assert torch.allclose(rounds.round(given), torch.stack(given).sum(0), atol=1e-12, rtol=0)


@pytest.mark.parametrize("beta", [0.0, 0.01, 1.0])
def test_gd_sec_server_state_is_the_sum_of_the_workers_states_and_the_residual_is_e(beta: float) -> None:
    """`h = sum_m h_m`; `e_m = D_m - sent_m`, with D_m and sent_m computed here from the rule."""
    xi, workers = 3.0, 3
    rounds = Rounds(beta, error_feedback(difference_threshold(xi)), workers)
    h = [torch.zeros(rounds.n, dtype=DOUBLE) for _ in range(workers)]
    e = [torch.zeros(rounds.n, dtype=DOUBLE) for _ in range(workers)]
    before = rounds.theta[0].clone()
    shares = []
    for number in range(30):
        given = [rounds.gradient() for _ in range(workers)]
        moved = (rounds.theta[0] - before).abs()
        before = rounds.theta[0].clone()
        expected = sum(h, start=torch.zeros_like(before))
        for m in range(workers):
            d = given[m] - h[m] + e[m]
            sent = torch.where(d.abs() > xi / workers * moved, d, 0.0)
            expected = expected + sent
            h[m] += beta * sent
            e[m] = d - sent
            shares.append(float((sent != 0).double().mean()))
            assert number or bool((sent != 0).all()), "the first round sends everything"
        assert torch.allclose(rounds.round(given), expected, atol=1e-12, rtol=0)
        for state, own, residual in zip(rounds.states, h, e, strict=True):
            assert torch.allclose(state.own, own, atol=1e-12, rtol=0)
            assert torch.allclose(state.all, sum(h, start=torch.zeros_like(before)), atol=1e-12, rtol=0)
            assert torch.allclose(rounds.how.residual(state.codec), residual, atol=1e-12, rtol=0)
    assert 0.05 < sum(shares[3:]) / len(shares[3:]) < 0.95, "the threshold must matter"


def test_ef21_is_the_papers_rule() -> None:
    """`h_m += C(g_m - h_m)`; the result is the sum of the h_m."""
    rounds = Rounds(1.0, top_k(0.2))
    h = [torch.zeros(rounds.n, dtype=DOUBLE) for _ in range(3)]
    for _ in range(10):
        given = [rounds.gradient() for _ in range(3)]
        for own, g in zip(h, given, strict=True):
            d = g - own
            kept = d.abs() >= d.abs().sort(descending=True).values[math.ceil(0.2 * rounds.n) - 1]
            own += torch.where(kept, d, 0.0)
        assert torch.allclose(rounds.round(given), h[0] + h[1] + h[2], atol=1e-12, rtol=0)


def test_a_worker_without_changes_sends_nothing_and_still_counts() -> None:
    rounds = Rounds(1.0, difference_threshold(0), workers=3)
    gradients = [rounds.gradient() for _ in range(3)]
    rounds.round(gradients)
    again = [gradients[0], gradients[1] * 2, gradients[2]]
    result = rounds.round(again)
    assert rounds.sent_bytes[1][0] == rounds.sent_bytes[1][2] == 0 < rounds.sent_bytes[1][1]
    assert torch.allclose(result, torch.stack(again).sum(0), atol=1e-12, rtol=0)


def test_groups_of_workers_send_in_turn() -> None:
    rounds = Rounds(1.0, difference_threshold(0), workers=4, groups=2)
    gradients = [rounds.gradient() for _ in range(4)]
    assert torch.allclose(rounds.round(gradients), gradients[0] + gradients[2], atol=1e-12, rtol=0)
    assert torch.allclose(rounds.round(gradients), torch.stack(gradients).sum(0), atol=1e-12, rtol=0)
    assert [sent > 0 for sent in rounds.sent_bytes[0]] == [True, False, True, False]
    assert [sent > 0 for sent in rounds.sent_bytes[1]] == [False, True, False, True]


@pytest.mark.parametrize(
    "recipe", ["gd_sec(xi=0, beta=0.3)", "Recipe(what=gradient_differences(0.5))", "ef21(exact())"]
)
def test_lossless_gradient_differences_equal_allreduce_in_training(recipe: str) -> None:
    data = regression(96, DOUBLE)
    wanted = run_workers(3, training(data, 8, 3, dtype=DOUBLE), "allreduce")[0]
    assert relative_distance(run_workers(3, training(data, 8, 3, dtype=DOUBLE), recipe)[0], wanted) <= 1e-10


# --- 1-bit Adam -------------------------------------------------------------------------------------------------


def adam_with_frozen_variance(data: Any, warm_up: int, batch: int, epochs: int, lr: float, decay: float) -> Tensor:
    """Train one process by the paper's pseudocode: AdamW, with v and its correction constant after warm-up."""
    net = small_net(DOUBLE)
    parameters = list(net.parameters())
    m = [torch.zeros_like(one) for one in parameters]
    v = [torch.zeros_like(one) for one in parameters]
    frozen: list[Tensor] = []
    t = 0
    for _ in range(epochs):
        for x, y in DataLoader(data, batch_size=batch):
            net.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            t += 1
            with torch.no_grad():
                for i, one in enumerate(parameters):
                    m[i] = 0.9 * m[i] + 0.1 * one.grad
                    one.mul_(1 - lr * decay)
                    if t <= warm_up:
                        v[i] = 0.999 * v[i] + 0.001 * one.grad**2
                        one -= lr * (m[i] / (1 - 0.9**t)) / ((v[i] / (1 - 0.999**t)).sqrt() + 1e-8)
                        continue
                    if len(frozen) <= i:
                        frozen.append((v[i] / (1 - 0.999**warm_up)).sqrt() + 1e-8)
                    one -= lr * m[i] / frozen[i]
    return flat(net)


def one_bit_training(data: Any, epochs: int, lr: float, decay: float, betas: tuple[float, float] = (0.9, 0.999)) -> Any:
    def work(worker: int) -> Tensor:
        net = small_net(DOUBLE)
        optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=decay, betas=betas)
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8))
        for _ in range(epochs):
            for x, y in loader:
                optimizer.zero_grad()
                nn.functional.mse_loss(net(x), y).backward()
                optimizer.step()
        return flat(net)

    return work


def test_one_bit_without_encoding_equals_adam_with_a_frozen_variance() -> None:
    data = regression(96, DOUBLE)
    recipe = "Recipe(what=momenta(warm_up=5), then=frozen_variance())"
    found = run_workers(3, one_bit_training(data, 4, 0.01, 0.1), recipe)[0]
    assert relative_distance(found, adam_with_frozen_variance(data, 5, 24, 4, 0.01, 0.1)) <= 1e-9


def test_one_bit_needs_adam_with_its_beta() -> None:
    with pytest.raises(ModelError, match=r"beta1=0\.8"):
        run_workers(2, one_bit_training(regression(32, DOUBLE), 1, 0.01, 0.0, (0.8, 0.999)), "one_bit")


# --- combinations with warnings ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("recipe", "momentum", "warning"),
    [
        ("gd_sec(xi=100, beta=0.5)", 0.0, "lr * beta * xi = 5 is above 1"),
        ("gd_sec(xi=100, beta=0.1)", 0.0, ""),
        ("quantised_gd_sec(xi=300, beta=0.1)", 0.0, "xi=100 is the most that is safe with lr=0.1"),
        ("deep_gradient_compression", 0.9, "one of 0.9 as well"),
        ("deep_gradient_compression", 0.0, ""),
        ("power_sgd", 0.9, ""),
    ],
)
def test_combinations_that_harm_training_are_warned_about(recipe: str, momentum: float, warning: str) -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=momentum)
    warnings = list(advice(parse(recipe), optimizer))
    assert len(warnings) == bool(warning)
    assert warning in "".join(warnings)


# --- NaN, traffic, replies --------------------------------------------------------------------------------------


def test_a_gradient_with_nan_is_not_encoded_and_reaches_all_workers() -> None:
    data = regression(64, DOUBLE)
    seen: dict[int, bool] = {}

    def work(worker: int) -> None:
        net = small_net(DOUBLE)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8))
        for x, y in loader:
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(net(x), y)
            (loss * (torch.nan if worker == 1 else 1.0)).backward()
            seen[worker] = all(bool(one.grad.isnan().all()) for one in net.parameters() if one.grad is not None)
            optimizer.step()

    with pytest.raises(NotFiniteError):
        run_workers(3, work, "allreduce(how=error_feedback(top_k(0.1)))")
    assert seen == {0: True, 1: True, 2: True}


def traffic_of(folder: Path) -> dict[str, list[int]]:
    """Return the traffic of all workers in bytes, by purpose."""
    ends = [one for one in read_events(folder / "events.jsonl") if one["event"] == "end"]
    return {
        purpose: [sum(values) for values in zip(*(one["traffic"][purpose] for one in ends), strict=True)]
        for purpose in ends[0]["traffic"]
    }


def test_bytes_are_counted_by_purpose_and_direction(tmp_path: Path) -> None:
    data = regression(96, torch.float32)
    run_workers(2, training(data, 8, 2), "allreduce", run=tmp_path)
    raw_sent, sent, raw_received, received = traffic_of(tmp_path)["gradients"]
    assert raw_sent == sent == raw_received == received > 0


def test_a_codec_of_half_the_bytes_halves_the_counted_traffic(tmp_path: Path) -> None:
    data = regression(96, torch.float32)
    run_workers(2, training(data, 8, 2), 'allreduce(how=cast("bf16"))', run=tmp_path)
    raw_sent, sent, raw_received, received = traffic_of(tmp_path)["gradients"]
    assert raw_sent == 2 * sent == raw_received == 2 * received


def test_encoded_replies_are_counted_separately(tmp_path: Path) -> None:
    data = regression(96, torch.float32)
    how = "both_ways(error_feedback(top_k(0.05)), top_k(0.3))"
    run_workers(2, training(data, 8, 2), f"async_sgd(how={how})", run=tmp_path)
    raw_sent, sent, raw_received, received = traffic_of(tmp_path)["updates"]
    assert raw_sent == raw_received
    assert sent < 0.2 * raw_sent
    assert 0 < received < 0.6 * raw_received
    end = next(one for one in read_events(tmp_path / "events.jsonl") if one["event"] == "end")
    values, of_values = end["values_sent"]
    assert 0.02 < values / of_values < 0.1
    assert len(end["residual_norms"]) == 2


def test_lossless_encoded_replies_equal_exact_replies() -> None:
    """Encoded replies that hold every change give the same model as exact replies."""
    data = regression(96, DOUBLE)
    wanted = run_workers(2, training(data, 8, 3, dtype=DOUBLE), "stale_synchronous(bound=0)")[0]
    recipe = "stale_synchronous(bound=0, how=both_ways(exact(), top_k(1.0)))"
    found = run_workers(2, training(data, 8, 3, dtype=DOUBLE), recipe)[0]
    assert relative_distance(found, wanted) <= 1e-9


CODECS = [
    'cast("fp16")',
    "quantise(4, bucket=16)",
    "ternary(bucket=16)",
    "error_feedback(sign(bucket=16))",
    "error_feedback(top_k(0.2))",
    "error_feedback(random_k(0.3))",
    "error_feedback(threshold(0.001, adaptive=True, clip=5))",
    "error_feedback(chunked(chunk=16, k=4))",
    "error_feedback(chain(top_k(0.3), quantise(8)))",
    "deep_gradient_compression(0.2, momentum=0.5, warm_up=2)",
    "error_feedback(low_rank(1))",
    "by_size(error_feedback(top_k(0.2)), least=30)",
    "error_feedback(when_it_pays(quantise(8), rounds=4, again=6))",
]
RECIPES = [
    "allreduce(how={})",
    "diloco(every=2, how={})",
    "Recipe(how={}, whom=server(shards=2))",
    "async_sgd(2.0, how={})",
]


@pytest.mark.parametrize(("codec", "place"), each_value(CODECS, RECIPES))
def test_every_codec_works_in_every_kind_of_recipe(codec: str, place: str) -> None:
    if "async" in place and not parse(f"allreduce(how={codec})").how.pair:
        with pytest.raises(RecipeError, match="pair of encode and decode"):
            parse(place.format(codec))
        return
    found = run_workers(3, training(regression(64), 8, 2), place.format(codec))
    assert all(torch.equal(one, found[0]) for one in found)
    assert bool(found[0].isfinite().all())


def test_exact_encodes_gradient_differences() -> None:
    assert gradient_differences().init_state(exact(), torch.zeros(3), CodecContext()).own.tolist() == [0, 0, 0]


def test_thawing_a_layer_keeps_the_residuals_of_the_others() -> None:
    data = regression(64)

    def residuals_of(trainer: Any) -> dict[str, Tensor]:
        pieces = trainer.strategy._pieces(trainer.strategy.sets[0])
        found = carried_state.residuals(trainer.recipe.how, pieces)
        return {slot.name: slot.view(flat).clone() for part, flat in found for slot in part.slots}

    def work(worker: int) -> None:
        net = small_net()
        first = next(iter(net.parameters())).requires_grad_(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        loader = stretto.distribute(net, optimizer, DataLoader(data, batch_size=8))
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.mse_loss(net(x), y).backward()
            optimizer.step()
        before = residuals_of(api.training())
        first.requires_grad_(True)
        iter(loader)
        after = residuals_of(api.training())
        assert len(after) == len(before) + 1
        assert any(bool(one.any()) for one in before.values())
        assert all(torch.equal(one, after[name]) for name, one in before.items())

    run_workers(2, work, "allreduce(how=error_feedback(top_k(0.1)))")
