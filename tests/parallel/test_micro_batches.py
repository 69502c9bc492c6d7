"""Micro-batches have the outputs of the whole batch, or the model is refused at its first call."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from stage_threads import callbacks, in_threads
from torch import Tensor, nn

from stretto.errors import ModelError
from stretto.parallel.link import CPU, Link
from stretto.parallel.micro_batches import micro_batch, pieces, refuse_mixing, rows_of
from stretto.parallel.rank_parts import RankContext
from stretto.parallel.stages import PipelineStages
from stretto.recipe.layout import pipeline
from stretto.strategies.optimizers import Optimizers

FOUR = pipeline(2, 4)


class Language(nn.Module):
    """Recurrent language model, whose first dimension is time unless `batch_first`."""

    def __init__(self, batch_first: bool = False) -> None:
        super().__init__()
        self.embed, self.rnn = nn.Embedding(9, 8), nn.LSTM(8, 8, batch_first=batch_first)
        self.head = nn.Linear(8, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.embed(x))[0])  # type: ignore[no-any-return]


class Sampling(nn.Module):
    """Variational autoencoder, whose outputs are random in evaluations, too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        mean = self.a(x)
        return self.b(mean + torch.randn(mean.shape))  # type: ignore[no-any-return]


class Applied(nn.Module):
    """Layer and a function of its outputs and of a second argument."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.function = nn.Linear(4, 4), function

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.function(self.a(x), other)


def tried(model: nn.Module, *args: Tensor) -> None:
    torch.manual_seed(0)
    refuse_mixing(model, FOUR, args, {}, CPU)


def test_arguments_are_cut_by_the_rows_of_the_first_tensor() -> None:
    batch = {"x": torch.arange(5), "table": torch.ones(3, 2), "k": 7}
    assert rows_of(((batch,), {})) == 5
    assert [len(each) for _, each in pieces([None, torch.arange(5)], 2)] == [3, 2]
    (first,), _ = micro_batch(FOUR, [batch], {})
    assert first["x"].tolist() == [0, 1]
    assert (first["table"].shape, first["k"]) == ((3, 2), 7)


def test_a_model_whose_first_dimension_is_time_is_refused_at_its_first_call() -> None:
    def work(link: Link) -> None:
        torch.manual_seed(0)
        net = Language()
        optimizers = Optimizers([torch.optim.SGD(net.parameters(), lr=0.1)])
        context = RankContext(net, optimizers, None, None, None, 1, link, False, *callbacks(), 20.0)
        PipelineStages(pipeline(2, 4, "head"), context).begin(None)
        net(torch.randint(0, 9, (12, 6)))

    with pytest.raises(ModelError, match=r"mixes its samples\n  got: outputs that differ by(.*\n)*.*batch_first=True"):
        in_threads(2, work)


def test_models_that_treat_each_sample_for_itself_are_tried_without_a_trace() -> None:
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 2)).requires_grad_()
    net[2].eval()
    before, state = {name: one.clone() for name, one in net.state_dict().items()}, torch.get_rng_state()
    refuse_mixing(net, FOUR, [torch.randn(10, 4)], {}, CPU)
    torch.set_rng_state(state)
    refuse_mixing(net, FOUR, [torch.ones(10, 4)], {}, CPU)
    assert [one.training for one in net] == [True, True, False, True]
    assert all(torch.equal(one, before[name]) for name, one in net.state_dict().items())
    assert torch.equal(torch.get_rng_state(), state)
    tried(Language(batch_first=True), torch.randint(0, 9, (12, 6)))
    tried(Sampling(), torch.randn(12, 4))
    tried(Applied(lambda x, rows: x.masked_fill(rows > 0, -torch.inf)), torch.randn(8, 4), torch.randn(8, 4))


@pytest.mark.parametrize(
    ("function", "got"),
    [
        (lambda x, _: x - x.mean(0), "outputs that differ by"),
        (lambda x, _: x @ x.T, "outputs of shape"),
        (lambda x, table: x[:, :1] * table[None, :, 0], "outputs of shape"),
        (lambda x, table: x + table[:8], r"RuntimeError with a micro-batch: The size of tensor a \(2\)"),
    ],
)
def test_mixed_samples_are_refused(function: Callable[[Tensor, Tensor], Tensor], got: str) -> None:
    other = torch.randn(8, 4) if "shape" in got else torch.randn(9, 4)
    with pytest.raises(ModelError, match=rf"mixes its samples\n  got: {got}"):
        tried(Applied(function), torch.randn(8, 4), other)
