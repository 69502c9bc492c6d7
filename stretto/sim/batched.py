"""The steps of many workers in one call: forward and backward of as many models as wait for their gradients.

A worker whose script asks for a gradient lets the clock come to where somebody may first see it. The first for whom
that time has come computes the gradients of all who wait (torch.func: vmap of grad), those of the same computation
together. Sums are made in another order than one by one, so results are equal to rounding. That they are is looked at:
a worker's first step of a kind, its second, fourth, eighth and so on are computed both ways.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from stretto.errors import ScriptError, explain
from stretto.sim.answers import CALL, Model, Tape, played, real
from stretto.sim.world import Worker
from stretto.train.gradients import FORWARD

LEAST = 4
"""Fewer are computed one by one: a call for many costs as much as for so many."""
MOST = 256
"""More are several calls: it does not get faster, and takes memory."""
MOST_BYTES = 64 << 20
"""Of parameters in one call."""
MOST_CALLS, MOST_KINDS = 256, 10_000
"""Of calls that are kept as they were traced, and of kinds of steps that are known: then all are forgotten."""

Run = Callable[[dict[str, Tensor], dict[str, Tensor], list[Tensor]], tuple[dict[str, Tensor], list[Any]]]


class Batches:
    """Takes the steps of the workers of a world together. `say` is told once why what is not."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._tell = say
        self._models: dict[int, Model] = {}
        """By the id of the module."""
        self._waiting: list[Tape] = []
        self._kinds: dict[Any, int] = {}
        """Of models, numbered."""
        self._steps: dict[Any, int] = {}
        """The kinds of steps, numbered."""
        self._numbers = itertools.count()
        self._unfit: dict[int, str] = {}
        """By the kind of model: why its steps can't be computed with those of others."""
        self._runs: dict[Any, Run | None] = {}
        """By the kind of step and by how many there are: the call, or None when it was made once."""
        self._without: dict[Any, frozenset[int]] = {}
        """By the kind of step: parameters that get no gradient from it."""
        self._is_playing = False
        self._together = self._alone = self._calls = 0
        """Backward passes that were computed with others, those that were not, and the calls for many."""

    def begins(self, worker: Worker, module: nn.Module) -> None:
        """A worker has its model. That of an earlier life is not its model any more."""
        self._models = {key: one for key, one in self._models.items() if one.worker.number != worker.number}
        self._models[id(module)] = model = Model(worker, module)
        model.number = self._kinds.setdefault(model.kind, len(self._kinds))

    @contextmanager
    def on(self) -> Iterator[None]:
        """Have workers' models answer later."""
        backward = torch.autograd.backward

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            model = self._models.get(id(module))
            if model is None or self._is_playing or not torch.is_grad_enabled() or not model.worker.is_at_work():
                return CALL(module, *args, **kwargs)
            return self._answered(model, args, kwargs)

        def pass_alone(tensors: Any, *given: Any, **named: Any) -> None:
            self._alone += 1
            backward(real(tensors, "backward"), *given, **named)

        nn.Module.__call__ = call  # type: ignore[method-assign]
        torch.autograd.backward = pass_alone
        try:
            yield
        finally:
            nn.Module.__call__ = CALL  # type: ignore[method-assign]
            torch.autograd.backward = backward

    def summary(self) -> str:
        """What came of it, in words."""
        steps = self._together + self._alone
        return f"--batched: {self._together} of {steps} steps were computed in {self._calls} calls for many workers"

    def _say(self, text: str) -> None:
        self._tell(f"--batched: {text}: such steps are computed one by one")

    # --- a worker's step ----------------------------------------------------------------------------------------

    def _answered(self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A model's answer, or what it will be. The first is made, to see what it is."""
        if not model.is_current:
            self.begins(model.worker, model.module)
            model = self._models[id(model.module)]
        if why := self._why_alone(model):
            self._say(why)
        elif not model.is_known:
            found = CALL(model.module, *args, **kwargs)
            model.is_known = type(found) is Tensor
            if not model.is_known:
                model.unfit = f"the model answers with {type(found).__name__}, no tensor"
            return found
        else:
            tape = Tape(model, self.step, self._say)
            tape.key = model.number, model.state
            if (answer := tape.note(None, args, kwargs)) is not None:
                return answer
            self._say("the model is given what is neither a plain tensor nor a plain value")
        return CALL(model.module, *args, **kwargs)

    def _why_alone(self, model: Model) -> str:
        if model.is_hooked:
            return "the model has hooks"
        if torch._C._is_any_autocast_enabled():
            return "the model is called under autocast"
        return model.unfit or self._unfit.get(model.number, "")

    def step(self, tape: Tape, loss: int) -> bool:
        """Compute the gradient of a value with those of others. False if it is to be computed as torch does."""
        model, worker = tape.model, tape.model.worker
        if model.is_heard or worker.in_backward:
            return False
        tape.loss = loss
        shapes = tuple((one.shape, one.dtype, one.device) for one in tape.inputs)
        tape.key = self._number((tape.key, tuple(tape.calls), loss, shapes))
        self._waiting.append(tape)
        worker.computes((FORWARD if model.is_exchanged else 1.0) * model.progress())
        worker.catch_up()
        if tape.gradients is None and not tape.is_alone:
            self._compute()
        if tape.gradients is None:
            return False
        self._check(tape)
        worker.backward(lambda: _accumulate(tape, self._without[tape.key]))
        tape.forget()
        return True

    def _number(self, kind: Any) -> int:
        """Of a kind of step. None comes twice, even when all kinds are forgotten: there are too many if each is new."""
        if len(self._steps) >= MOST_KINDS:
            for known in (self._steps, self._runs, self._without, *(one.seen for one in self._models.values())):
                known.clear()  # type: ignore[attr-defined]
        return self._steps.setdefault(kind, next(self._numbers))

    def _check(self, tape: Tape) -> None:
        """Compute a step in the other way, too, every now and then. Raises ScriptError if the gradient is another."""
        seen = tape.model.seen
        number = seen[tape.key] = seen.get(tape.key, 0) + 1
        if number & (number - 1):
            return
        trained = [one for one in tape.model.parameters if one.requires_grad]
        own = torch.autograd.grad(tape.play()[tape.loss], trained, allow_unused=True)
        without = frozenset(index for index, one in enumerate(own) if one is None)
        assert tape.gradients is not None
        is_alike = self._without.setdefault(tape.key, without) == without
        if not (is_alike and _equal(tape.gradients, own)):
            raise ScriptError(_differs(tape.model))

    # --- the steps of many --------------------------------------------------------------------------------------

    def _compute(self) -> None:
        """Compute the gradients of all who wait."""
        waiting, self._waiting = self._waiting, []
        groups: dict[Any, list[Tape]] = {}
        for tape in waiting:
            groups.setdefault(tape.key, []).append(tape)
        for tapes in groups.values():
            at, most = 0, min(MOST, MOST_BYTES // max(tapes[0].model.nbytes, 1))
            while (left := min(len(tapes) - at, most)) >= LEAST:
                size = 1 << (left.bit_length() - 1)
                self._at_once(tapes[at : at + size])
                at += size
            for tape in tapes[at:]:
                tape.is_alone = True

    def _at_once(self, tapes: Sequence[Tape]) -> None:
        """One call. A computation that can't be made so is made one by one from now on."""
        first = tapes[0].model
        put_back, state = first.kept(), first.state
        try:
            gradients, values = self._called(tapes)
            if first.state != state:
                raise RuntimeError("its forward pass changes the model's attributes")
        except Exception as error:
            put_back()
            self._unfit[first.number] = str(error).partition("\n")[0]
            self._say(self._unfit[first.number])
            for tape in tapes:
                tape.is_alone = True
            return
        self._calls += 1
        self._together += len(tapes)
        rows = [
            gradients[name].unbind(0)
            for name, one in zip(first.names, first.parameters, strict=True)
            if one.requires_grad
        ]
        for row, tape in enumerate(tapes):
            tape.stacked, tape.row = values, row
            tape.gradients = [one[row] for one in rows]

    def _called(self, tapes: Sequence[Tape]) -> tuple[dict[str, Tensor], list[Any]]:
        first, key = tapes[0], (tapes[0].key, len(tapes))
        trained, frozen = dict[str, Tensor](), dict[str, Tensor]()
        self._is_playing = True
        try:
            with torch.no_grad():
                for index, name in enumerate(first.model.names):
                    stacked = torch.stack([tape.model.parameters[index] for tape in tapes])
                    (trained if first.model.parameters[index].requires_grad else frozen)[name] = stacked
                inputs = [torch.stack([tape.inputs[index] for tape in tapes]) for index in range(len(first.inputs))]
                return self._run(key, first, (trained, frozen, inputs))(trained, frozen, inputs)
        finally:
            self._is_playing = False

    def _run(self, key: Any, tape: Tape, given: tuple[Any, ...]) -> Run:
        """The call for a kind of step. It is traced when it is made for the second time, and quicker from then on."""
        run = self._runs.get(key)
        if run is not None:
            return run
        plain: Run = vmap(grad(_replay(tape), has_aux=True), randomness="error")
        if key in self._runs:
            plain = self._runs[key] = make_fx(plain)(*given)
        elif len(self._runs) < MOST_CALLS:
            self._runs[key] = None
        return plain


def _replay(tape: Tape) -> Callable[..., tuple[Tensor, list[Any]]]:
    module, calls, loss = tape.model.module, tuple(tape.calls), tape.loss

    def replay(trained: dict[str, Tensor], frozen: dict[str, Tensor], inputs: list[Tensor]) -> tuple[Tensor, list[Any]]:
        def model(*args: Any, **kwargs: Any) -> Any:
            return functional_call(module, {**trained, **frozen}, args, kwargs)

        values = played(calls, inputs, model)
        return values[loss], values

    return replay


def _accumulate(tape: Tape, without: frozenset[int]) -> None:
    """Give each parameter its gradient, as a backward pass does: it comes to what is there, and is heard of."""
    trained = [one for one in tape.model.parameters if one.requires_grad]
    assert tape.gradients is not None
    for index, (parameter, gradient) in enumerate(zip(trained, tape.gradients, strict=True)):
        if index in without:
            continue
        if parameter.grad is None:
            parameter.grad = gradient
        else:
            parameter.grad.add_(gradient)
        for listener in tuple((parameter._post_accumulate_grad_hooks or {}).values()):
            listener(parameter)


def _equal(found: Sequence[Tensor], own: Sequence[Tensor | None]) -> bool:
    """Whether gradients differ by rounding only; nobody can tell of those that are not finite."""
    apart = size = 0.0
    for one, other in zip(found, own, strict=True):
        there = torch.zeros_like(one) if other is None else other
        apart += float((one - there).square().sum())
        size += float(there.square().sum())
    rounding = torch.finfo(found[0].dtype).eps
    return not (apart > rounding * size) or size == apart == 0


def _differs(model: Model) -> str:
    number = model.worker.number
    return explain(
        f"a step of worker {number} computed with those of others is not what it is alone",
        got="models that differ in what can't be seen, or that depend on more than their input",
        expected="models that are alike but for their parameters",
        to_type="the same command without --batched",
    )
