"""Many workers' steps in one call: the same run to rounding, whatever the script does; and what cannot be is told."""

from __future__ import annotations

import re
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import torch
from safetensors.torch import load
from sim.simulated import Ended, simulated

from stretto.errors import LaunchError, ScriptError
from stretto.events import Event
from stretto.sim import batched
from stretto.sim.answers import Answer

NET = "torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.Tanh(), torch.nn.Linear(12, 3))"
STEP = """
optimizer.zero_grad()
loss = cross_entropy(net(a), b)
loss.backward()
optimizer.step()
"""
SCRIPT = """
import torch, stretto
from torch.nn.functional import cross_entropy
torch.manual_seed(3)
x = torch.randn(330, 6, dtype=torch.float64)
y = (x[:, 0] > 0).long() + (x[:, 1] > 0).long()
BEFORE
net = NET.double()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=5, shuffle=True)
loader = stretto.distribute(net, optimizer, loader, evaluate=lambda net: {"loss": cross_entropy(net(x), y).item()})
for epoch in range(2):
    for a, b in loader:
STEP
"""
WORKERS = 9


def script(step: str = STEP, net: str = NET, before: str = "") -> str:
    indented = "".join(f"        {line}\n" for line in dedent(step).strip().splitlines())
    return SCRIPT.replace("BEFORE", dedent(before)).replace("NET", net).replace("STEP\n", indented)


def both(text: str, recipe: str = "local_sgd(every=4)", **more: Any) -> tuple[Ended, Ended]:
    """The same simulation without batches, and with them."""
    return simulated(WORKERS, text, recipe, **more), simulated(WORKERS, text, recipe, batched=True, **more)


def together(ended: Ended) -> tuple[int, int]:
    """How many steps were computed with others, and how many there were."""
    text = next(one["text"] for one in ended.of("notice") if one["text"].startswith("--batched"))
    found = re.search(r"(\d+) of (\d+) steps", text)
    assert found is not None
    return int(found[1]), int(found[2])


def are_alike(alone: Ended, ended: Ended) -> None:
    """The same parameters to rounding, at the same times, with the same bytes."""
    own, theirs = load(alone.final), load(ended.final)
    for name, one in own.items():
        assert torch.allclose(one, theirs[name], rtol=1e-6, atol=1e-9), name
    assert ended.seconds == pytest.approx(alone.seconds, rel=1e-9)
    assert [what_and_when(one) for one in ended.events if not is_summary(one)] == [
        what_and_when(one) for one in alone.events
    ]


def is_summary(event: Event) -> bool:
    return event["event"] == "notice" and event["text"].startswith("--batched")


def what_and_when(event: Event) -> tuple[Any, ...]:
    counted = [event.get(key) for key in ("step", "samples", "rounds", "bytes_sent", "bytes_received")]
    return event["event"], event["worker"], pytest.approx(event["t"], abs=2e-6), counted


@pytest.mark.parametrize(
    "recipe",
    [
        "allreduce",
        "local_sgd(every=4)",
        "diloco(every=5)",
        "power_sgd(rank=2)",
        "async_sgd",
        "stale_synchronous(bound=2)",
        "elastic_averaging(every=3)",
        "delay_compensated",
        "staleness_aware(overlap=True)",
    ],
)
@pytest.mark.parametrize("speed", ["equal", "lognormal(0.5)"])
def test_the_run_is_the_same_to_rounding(recipe: str, speed: str) -> None:
    alone, ended = both(script(), recipe, speed=speed, net="100Mbit/s 1ms")
    are_alike(alone, ended)
    assert together(ended)[0] > 0


STEPS = {
    "a loss made of modules": STEP.replace("cross_entropy(", "torch.nn.CrossEntropyLoss()("),
    "looks after the step": STEP + "assert loss.item() > 0 and (net(a).argmax(1) == b).shape",
    "accuracy, looked at later": """
        optimizer.zero_grad()
        answer = net(a)
        right = (answer.argmax(1) == b).float().mean()
        cross_entropy(answer, b).backward()
        optimizer.step()
        stretto.log(right=right)
        """,
    "gradients that are accumulated": """
        optimizer.zero_grad()
        for part in range(2):
            (cross_entropy(net(a[part::2]), b[part::2]) / 2).backward()
        optimizer.step()
        """,
    "clipped": """
        optimizer.zero_grad()
        cross_entropy(net(a), b, label_smoothing=0.1).mul(2).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        """,
    "a scaler": """
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        optimizer.zero_grad()
        scaler.scale(cross_entropy(net(a), b)).backward()
        scaler.step(optimizer)
        scaler.update()
        """,
    "frozen for a while": "net[0].requires_grad_(epoch == 1)\n" + STEP,
    "numbers of a worker's own": """
        optimizer.zero_grad()
        (cross_entropy(net(a), b) * (1 + float(a[0, 0] > 0))).backward()
        optimizer.step()
        """,
    "a closure": """
        def closure():
            optimizer.zero_grad()
            loss = cross_entropy(net(a), b)
            loss.backward()
            return loss
        optimizer.step(closure)
        """,
    "weights": STEP.replace("net(a), b", "net(a), b, torch.tensor([1.0, 2, 3]).double()"),
}


@pytest.mark.parametrize("name", STEPS)
def test_whatever_a_script_does_that_can_be_batched(name: str) -> None:
    alone, ended = both(script(STEPS[name]))
    are_alike(alone, ended)
    found, steps = together(ended)
    assert found > steps / 2


ALONE = {
    "looks before": (STEP.replace("loss.backward()", "assert loss.item() > 0\nloss.backward()"), "uses item"),
    "the graph is kept": (STEP.replace("backward()", "backward(retain_graph=True)"), "uses backward"),
    "torch's own function": (STEP.replace("loss.backward()", "torch.autograd.backward([loss])"), "uses backward"),
    "a loss with parameters in it": (
        STEP.replace("cross_entropy(net(a), b)", "cross_entropy(net(a), b) + net[0].weight.square().sum()"),
        "uses add",
    ),
    "two answers": (STEP.replace("net(a), b)", "net(a[:2]), b[:2]) + cross_entropy(net(a[2:]), b[2:])"), "uses add"),
    "a gradient is given": (
        STEP.replace("b)", 'b, reduction="none")').replace("backward()", "backward(torch.ones(len(b)).double())"),
        "uses backward",
    ),
    "a function of the script's own": (
        """
        class Reversed(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x.clone()
            @staticmethod
            def backward(context, grad):
                return -grad
        """
        + STEP.replace("net(a)", "Reversed.apply(net(a))"),
        "uses apply",
    ),
    "a look in inference mode": (
        STEP.replace("loss.backward()", "with torch.inference_mode(): assert loss.item() > 0\nloss.backward()"),
        "uses item",
    ),
    "a look at None": (STEP.replace("loss.backward()", "assert not loss == None\nloss.backward()"), "uses"),
    "a loss under autocast": (
        STEP.replace("loss = cross", 'out = net(a)\nwith torch.autocast("cpu"): loss = cross').replace(
            "net(a), b", "out, b"
        ),
        "uses cross_entropy",
    ),
    "each sample by itself": (STEP.replace("net(a)", "torch.vmap(net)(a)"), ""),
    "under autocast": (
        STEP.replace("loss = cross_entropy(net(a), b)", 'with torch.autocast("cpu"): loss = cross_entropy(net(a), b)'),
        "autocast",
    ),
    "hooks": ("if not net._forward_hooks: net.register_forward_hook(lambda *given: None)\n" + STEP, "has hooks"),
    "gradients with listeners": (
        "handle = net[0].weight.register_hook(lambda grad: grad * 0.5)\n" + STEP + "handle.remove()",
        "",
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_what_can_not_be_batched_is_computed_one_by_one_and_told(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    step, why = ALONE[name]
    alone, ended = both(script(step))
    are_alike(alone, ended)
    assert together(ended)[0] == 0
    said = capsys.readouterr().err
    assert why in said
    assert "--batched: 0 of" in said


NETS = {
    "dropout": NET.replace("torch.nn.Tanh()", "torch.nn.Dropout(0.5)"),
    "buffers": NET.replace("torch.nn.Tanh()", "torch.nn.BatchNorm1d(12)"),
    "in place": NET.replace("torch.nn.Tanh()", "torch.nn.ReLU(inplace=True)"),
    "a class of the script's own": "Own()",
    "a forward of a layer's own": "shadowed(" + NET + ")",
    "two answers": "Pair()",
}
OWN = """
class Own(torch.nn.Linear):
    times = 0
    def __init__(self):
        super().__init__(6, 3)
    def forward(self, x):
        self.times = self.times + 1
        return super().forward(x) / self.times
class Pair(Own):
    def forward(self, x):
        return torch.nn.Linear.forward(self, x), x
def shadowed(net):
    net[1].forward = lambda x: x.cos()
    return net
"""


@pytest.mark.parametrize("name", NETS)
def test_models_that_can_not_be_batched_are_computed_one_by_one(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    step = STEP.replace("net(a)", "net(a)[0]") if name == "two answers" else STEP
    alone, ended = both(script(step, NETS[name], OWN).replace("net(x), y)", "torch.zeros(330, 3).double(), y)"))
    are_alike(alone, ended)
    assert alone.final == ended.final
    assert together(ended)[0] == 0
    assert "is none of the layers" in capsys.readouterr().err


@pytest.mark.parametrize(
    "layers",
    [
        "LayerNorm(6), ReLU(), Linear(6, 8), LeakyReLU(0.1), PReLU(), Linear(8, 8, bias=False), ELU(), Linear(8, 3)",
        "Linear(6, 8), GELU(), Unflatten(1, (2, 4)), Softmax(2), Flatten(), Identity(), SiLU(), Linear(8, 3)",
        "Linear(6, 8), Sequential(Softplus(), Linear(8, 8), Mish()), Hardtanh(), Linear(8, 3), LogSoftmax(1)",
        "CELU(), Linear(6, 6), SELU(), Softsign(), Sigmoid(), Linear(6, 5), Hardswish(), ReLU6(), Linear(5, 3)",
        "Linear(6, 6), LogSigmoid(), Tanh(), Linear(6, 3)",
    ],
)
def test_layers_that_can_be(layers: str) -> None:
    alone, ended = both(script(STEP, f"Sequential({layers})", "from torch.nn import *"))
    are_alike(alone, ended)
    assert together(ended)[0] > 0


def test_words_are_embedded() -> None:
    net = "torch.nn.Sequential(torch.nn.Embedding(5, 4), torch.nn.Flatten(), torch.nn.Linear(24, 3))"
    text = script(STEP.replace("net(a)", "net(words(a))"), net, "def words(x): return x.long().clamp(-2, 2) + 2")
    alone, ended = both(text.replace("net(x)", "net(words(x))"))
    are_alike(alone, ended)
    assert together(ended)[0] > 0


def test_tied_weights_are_one() -> None:
    before = """
    def tied(net):
        net[2].weight = net[0].weight
        return net
    """
    net = "tied(torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Tanh(), torch.nn.Linear(6, 6)))"
    alone, ended = both(script(STEP + "net[0].weight.grad.mul_(0.5)", net, before))
    are_alike(alone, ended)
    assert together(ended)[0] > 0


SLOPES = NET.replace("torch.nn.Tanh()", "torch.nn.LeakyReLU(0.1)")


def test_what_layers_have_besides_their_parameters_counts() -> None:
    """Each worker may be in another epoch than the others."""
    step = "net[1].negative_slope = 0.1 + 0.1 * epoch + 0.3 * float(a[0, 0] > 0)\n" + STEP
    alone, ended = both(script(step, SLOPES), "async_sgd", speed="lognormal(0.5)")
    are_alike(alone, ended)
    assert together(ended)[0] > 0


def test_layers_may_be_others_in_another_epoch() -> None:
    step = "if epoch: net[1] = torch.nn.ReLU()\n" + STEP
    alone, ended = both(script(step), "async_sgd", speed="lognormal(0.5)")
    are_alike(alone, ended)
    assert together(ended)[0] > 0


def test_there_may_be_too_many_kinds_of_steps(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batched, "MOST_KINDS", 3)
    step = "net[1].negative_slope = net[1].negative_slope * 0.99 + 0.01 * float(a[0, 0] > 0)\n" + STEP
    are_alike(*both(script(step, SLOPES), "async_sgd", speed="lognormal(0.5)"))
    assert "too many kinds" in capsys.readouterr().err


def test_gradients_have_places_of_their_own() -> None:
    """A script may change them in place: of expanded numbers, and of numbers that two gradients share."""
    expanded, whole = torch.ones(1, 1).expand(3, 4), torch.ones(3, 4)
    found = batched._apart([expanded, whole, whole])
    for one in found:
        one.mul_(2)
    assert all(torch.equal(one, torch.full((3, 4), 2.0)) for one in found)


def test_gradients_that_vanish_are_no_difference() -> None:
    """The data are without noise: in the end only rounding is left."""
    text = """
    import torch, stretto
    torch.manual_seed(3)
    x = torch.randn(300, 4)
    y = x @ torch.tensor([[1.0], [-2], [3], [0.5]])
    net = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=5)
    loader = stretto.distribute(net, optimizer, loader)
    for epoch in range(40):
        for a, b in loader:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(net(a), b).backward()
            optimizer.step()
    """
    ended = simulated(WORKERS, text, "local_sgd(every=2)", batched=True)
    assert together(ended)[0] > 1000


def test_the_same_run_comes_again_bit_for_bit() -> None:
    runs = [
        simulated(WORKERS, script(), "async_sgd", speed="lognormal(0.5)", batched=True, order=order)
        for order in (None, None, list(reversed(range(WORKERS))))
    ]
    assert runs[0].log == runs[1].log == runs[2].log
    assert runs[0].final == runs[1].final == runs[2].final


@pytest.mark.parametrize("recipe", ["allreduce", "async_sgd"])
def test_who_dies_while_others_wait_for_the_same_call(recipe: str) -> None:
    """Times are those of the middle of a step."""
    fault = "kill worker 2 at 35ms, back after 20ms; kill worker 4 at 55ms; pause worker 1 for 30ms at 71ms"
    ended = simulated(WORKERS, script(), recipe, fault=fault, batched=True, net="1Gbit/s 1ms")
    assert together(ended)[0] > 0
    assert [one["text"] for one in ended.of("error")] == []
    for number in (1, 2):
        assert ended.of("epoch")[number - 1]["seen"]["once"] == 330


def test_processors_may_be_shared() -> None:
    alone, ended = both(script(), processors=2.0)
    are_alike(alone, ended)
    assert together(ended)[0] > 0


def test_models_that_differ_in_what_can_not_be_seen_are_found_out() -> None:
    step = "net[1].negative_slope = numpy.float64(given_seat.get().worker)\n" + STEP
    before = "import numpy\nfrom stretto.train.seat import given_seat"
    with pytest.raises(LaunchError, match="is not what it is alone"):
        simulated(WORKERS, script(step, SLOPES, before), "local_sgd(every=4)", batched=True)


def test_a_function_that_torch_does_not_tell_is_refused() -> None:
    before = """
    import warnings
    warnings.simplefilter("ignore")  # it is called old
    @torch.jit.script
    def doubled(x):
        return x * 2
    """
    with pytest.raises(LaunchError):
        simulated(WORKERS, script(STEP.replace("net(a)", "doubled(net(a))"), before=before), "async_sgd", batched=True)
    answer = Answer.of(None, 0)  # type: ignore[arg-type]
    with pytest.raises(ScriptError, match="without --batched"), torch._C.DisableTorchFunctionSubclass():
        torch.exp(answer)


@pytest.mark.parametrize(("change", "what"), [("optimizer.step()", "the model"), ("a.add_(1)", "its input")])
def test_an_answer_that_is_looked_at_too_late_is_refused(change: str, what: str) -> None:
    step = STEP.replace("loss.backward()", "other = net(a)\nloss.backward()").replace(
        "optimizer.step()", f"{change}\nother.sum().item()"
    )
    with pytest.raises(LaunchError, match=f"before {what} changed"):
        simulated(WORKERS, script(step), "local_sgd(every=4)", batched=True)


def test_an_input_that_workers_share_is_refused_when_it_changes(tmp_path: Path) -> None:
    """What scripts import is common to all workers."""
    (tmp_path / "common_input.py").write_text("import torch\nplace = torch.zeros(5, 6, dtype=torch.float64)\n")
    step = "common_input.place.copy_(a)\n" + STEP.replace("net(a)", "net(common_input.place)")
    with pytest.raises(LaunchError, match="before its input changed"):
        simulated(WORKERS, script(step, before="import common_input"), "async_sgd", batched=True, folder=tmp_path)


def test_nothing_is_left_behind() -> None:
    before = torch.nn.Module.__call__, torch.autograd.backward
    simulated(WORKERS, script(), "local_sgd(every=4)", batched=True)
    with pytest.raises(LaunchError):
        simulated(WORKERS, script("raise ValueError"), "local_sgd(every=4)", batched=True)
    assert before == (torch.nn.Module.__call__, torch.autograd.backward)
