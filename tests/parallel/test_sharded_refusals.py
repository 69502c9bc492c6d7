"""Models, optimizers and loops that sharded() can't run end in one error that says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from sharded_replicas import results
from stage_threads import callbacks
from thread_workers import regression, run_workers, small_net
from torch import Tensor, nn
from torch.optim import SGD, Optimizer
from torch.utils.data import DataLoader

import stretto
from stretto.errors import (
    BrokenTransportError,
    MemberOutError,
    ModelError,
    NothingCameError,
    RecipeError,
    ScriptError,
    StrettoError,
    TransportError,
)
from stretto.parallel.link import Link
from stretto.parallel.rank_group import RankGroup, mesh_of
from stretto.parallel.rank_parts import RankContext
from stretto.parallel.refusals import refuse_kept_parameters
from stretto.parallel.sharded import ShardedModel, layers_of
from stretto.parallel.shards import Shards
from stretto.recipe.layout import sharded
from stretto.recipe.parser import parse
from stretto.strategies.model_sync import SeveralModels
from stretto.strategies.optimizers import Optimizers
from stretto.transport import in_memory
from stretto.transport.siblings import Siblings


def divided(model: nn.Module, optimizer: Callable[..., Optimizer] = SGD, recipe: str = "allreduce") -> ShardedModel:
    """Return one rank's part of a model, which is refused before any rank is connected."""
    link = Link(in_memory.wires(2, 1.0)[0])
    optimizers = Optimizers([optimizer(model.parameters(), lr=0.1)])
    return ShardedModel(
        sharded(2),
        RankContext(model, optimizers, None, None, parse(recipe), 2, link, False, *callbacks(), timeout_s=1.0),
    )


class Scaled(nn.Module):
    """A model with a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(2, 2), nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.scale * self.layer(x)
        return found


def with_hook(net: nn.Module) -> nn.Module:
    """Return a model with a hook of a gradient."""
    net[0].bias.register_hook(lambda gradient: 2 * gradient)  # type: ignore[index]
    return net


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (lambda: torch.compile(small_net(), backend="eager"), "a compiled model cannot be divided among processes"),
        (lambda: SeveralModels([small_net(), small_net()]), "several models cannot be divided among processes"),
        (lambda: nn.ModuleDict({"net": small_net()}), "a model without a forward pass cannot be divided"),
        (lambda: with_hook(small_net()), r"a hook of the gradient of 0.bias would not run(.*\n)*.*clamp_"),
        (Scaled, "the parameter scale has no dimension"),
        (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True)), "the gradients of 0 are sparse"),
    ],
)
def test_models_without_parts_are_refused(model: Callable[[], nn.Module], expected: str) -> None:
    with pytest.raises(ModelError, match=expected):
        divided(model())


def test_a_state_that_one_rank_alone_reads_is_an_error() -> None:
    ends = in_memory.wires(2, 1.0)
    nets = [small_net() for _ in ends]
    for net, end in zip(nets, ends, strict=True):
        Shards(net, Optimizers([SGD(net.parameters(), lr=0.1)]), Link(end)).give_whole_states()
    with ThreadPoolExecutor(2) as pool:
        both = [*pool.map(lambda net: net.state_dict(), nets)]
    assert both[0].keys() == both[1].keys() == small_net().state_dict().keys()
    with pytest.raises(TransportError):
        nets[0].state_dict()


@pytest.mark.parametrize("recipe", ["power_sgd", "allreduce(how=by_size(low_rank(2)))"])
def test_codecs_of_whole_matrices_are_refused(recipe: str) -> None:
    with pytest.raises(RecipeError, match=r"low_rank\(.*\) factorises whole matrices(.*\n)*.*pipeline"):
        divided(small_net(), recipe=recipe)


class Remembering(SGD):
    """An optimizer that keeps a list of parameters of its own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.first = {"a": [self.param_groups[0]["params"][0]]}


def test_optimizers_that_keep_their_parameters_are_refused() -> None:
    net = small_net()
    with pytest.raises(ModelError, match="L-BFGS needs all parameters in one process"):
        divided(net, torch.optim.LBFGS)
    optimizer = Remembering(net.parameters())
    before = {id(one): name for name, one in net.named_parameters()}
    optimizer.param_groups[0]["params"] = [*small_net().parameters()]
    with pytest.raises(ModelError, match=r"got: 0.weight in the attribute first"):
        refuse_kept_parameters(optimizer, before)


def test_models_that_the_script_has_sharded_are_refused() -> None:
    def work(_worker: int) -> None:
        net = small_net()
        vars(net[0].weight)["device_mesh"] = SimpleNamespace(size=lambda: 2)
        stretto.distribute(net, SGD(net.parameters(), lr=0.1), DataLoader(regression(8)))

    with pytest.raises(ModelError, match=r"sharded already(.*\n)*.*expected: the plain model, which .* sharded\(\)"):
        run_workers(2, work)


def test_scripts_with_a_process_group_of_their_own_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    with pytest.raises(ScriptError, match="got: torch.distributed.init_process_group, of 4 processes"):
        mesh_of(Link(in_memory.wires(2, 1.0)[0]), 1.0)


def test_a_wait_for_a_rank_that_has_not_failed_ends_in_an_error_of_the_script() -> None:
    siblings = Siblings(0, 2, cast(Any, None))
    with pytest.raises(TransportError, match="the same calls in all processes of a worker"), siblings.waiting():
        raise NothingCameError("rank 0 waited 5.0 s for rank 1")
    with pytest.raises(MemberOutError, match="another rank of this worker has failed"), siblings.waiting():
        raise BrokenTransportError("connection closed by peer")


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("Timed out waiting 6000ms for send operation to complete", TransportError),
        ("Is there a distributed collective mismatch in your code?", TransportError),
        ("Read error [127.0.0.1]:1: Connection reset by peer", BrokenTransportError),
    ],
)
def test_operations_of_ranks_end_in_an_error_within_a_wait(text: str, kind: type[StrettoError]) -> None:
    entered: list[str] = []

    @contextmanager
    def waiting() -> Iterator[None]:
        entered.append("begin")
        try:
            yield
        finally:
            entered.append("end")

    def fail(_tensors: Any) -> None:
        raise RuntimeError(text)

    inner: Any = SimpleNamespace(allreduce=fail)
    with pytest.raises(StrettoError) as raised:
        RankGroup(inner, 0, 2, waiting).allreduce([torch.zeros(1)])
    assert type(raised.value) is kind
    assert entered == ["begin", "end"]


def test_layers_in_lists_are_gathered_apart_but_for_shared_ones() -> None:
    net = nn.Sequential(nn.Embedding(5, 4), nn.ModuleList([nn.Linear(4, 4), nn.ReLU()]), nn.Linear(4, 5, bias=False))
    assert layers_of(net) == [net[0], net[1][0], net[2]]
    net[2].weight = net[0].weight
    assert layers_of(net) == [net[1][0]]


def test_batch_normalisation_replaced_layers_and_parts_of_other_models_are_refused(tmp_path: Path) -> None:
    normalised, replaced = "normalised/sgd/float32/allreduce", "replaced/sgd/float32/allreduce"
    parted = "parted/sgd/float32/allreduce"
    found = results(tmp_path, 1, 2, [normalised, replaced, parted])
    assert "the batch normalisation norm would see one process's samples" in found[normalised]
    assert "the parameter head.weight came to the model after it was divided among processes" in found[replaced]
    assert "got: 0, a part of the model of a stretto.distribute before" in found[parted]
