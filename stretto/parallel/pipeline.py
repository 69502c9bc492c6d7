"""A model whose modules several ranks run one after another, in a plain training loop.

All ranks of a replica run the same script with the same batches. Each runs the whole forward pass; a module runs where
it belongs, and elsewhere returns a tensor without values (`remote.py`), so the model's own code between modules runs
everywhere. To autograd the model is one operation of this rank's parameters:

    rank 0                                   rank 1
    micro-batch 1 of its modules --input-->  micro-batch 1 of its modules
    micro-batch 2                --------->  micro-batch 2
    outputs of the whole batch   <---------  outputs of the whole batch
    loss, as of the whole model              loss, as of the whole model
                                             backward of micro-batch 2
    backward of micro-batch 2    <-gradient- backward of micro-batch 1
    backward of micro-batch 1    <---------
    gradients of its parameters              gradients of its parameters

So loss and metrics are equal at all ranks, and hooks of parameters see one gradient of the whole batch in each backward
pass. Parameters of other ranks stay in the model and in the optimizer, without memory: their values are NaN.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from stretto.errors import ModelError
from stretto.parallel import refusals
from stretto.parallel.calls import Calls, Forward, opened, put_back
from stretto.parallel.gradient_sums import summed_gradients
from stretto.parallel.link import BACKWARD, FORWARD, OUTPUT, Incoming, Link
from stretto.parallel.micro_batches import pieces
from stretto.parallel.pass_record import PassRecord
from stretto.parallel.rank_parts import uncompiled
from stretto.parallel.read_guard import allow_objects
from stretto.parallel.remote import RemoteTensor, kind_of, leaves, mapped, received, remote, repeated, seen
from stretto.parallel.remote_gradient import GradientNorm
from stretto.parallel.remote_parameter import let_go, take, within_pass
from stretto.parallel.saved_state import give_whole_optimizer_states, give_whole_states
from stretto.recipe.layout import pipeline
from stretto.runtime.device_random import kept_random_states, seed_for, seed_of
from stretto.strategies.optimizers import Optimizers
from stretto.strategies.parameter_view import hold_elsewhere, hold_here, is_held


@dataclass(slots=True)
class _Turn:
    """The pass of one micro-batch through this rank's modules."""

    flat: list[Any]
    """Arguments of the model for this micro-batch."""
    coming: Incoming | None = None
    """Input of this stage on its way; None once it is here, and at the first stage."""
    now: int = 0
    """The last call that has begun."""
    closed: bool = False
    """True within a module that one stage runs."""
    sends: bool = True
    """False if the pass only repeats one, so its input was received and its result was sent."""
    input: Tensor | None = None
    sent: Tensor | None = None
    outputs: list[Any] = field(default_factory=list)
    seed: int = 0


@dataclass(slots=True)
class _Pass:
    """A forward pass of a batch, which a backward pass may follow."""

    turns: list[_Turn]
    shape: TreeSpec
    """Shape of the arguments."""
    with_gradients: bool
    returned: TreeSpec | None = None
    """Shape of what the model returns."""
    rest: list[Any] = field(default_factory=list)
    """The model's results, whose tensors are those of the first turn."""
    autocast: torch.dtype | None = None
    """The precision of torch.autocast in it; None without."""
    is_over: bool = False
    """True once a backward pass has used it."""


class Pipeline:
    """One rank of a pipeline over a model, from now on in place of the model's `forward`.

    `begins` are the first calls of all stages. The optimizers keep all parameters, the state of this rank's alone.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Optimizers,
        layout: pipeline,
        link: Link,
        calls: Calls,
        begins: Sequence[int],
        record: PassRecord | None = None,
        norm: GradientNorm | None = None,
        on_backward: Callable[[], None] = lambda: None,
    ) -> None:
        self._model, self._layout, self._link, self._calls, self._begins = model, layout, link, calls, list(begins)
        self.record = record or PassRecord()
        self._plain, self._own_forward = model.forward, vars(model).get("forward")
        self._modules: dict[str, tuple[nn.Module, Forward | None]] = {}
        """Modules that are called in a forward pass, and the `forward` that the script has set for them."""
        self._known = {id(one): one for one in model.parameters()}
        """Parameters of the model when it was split."""
        self._turn: _Turn | None = None
        self._shapes: dict[Any, Any] = {}
        self._passes = 0
        self._is_first, self._is_last = link.rank == 0, link.rank == link.ranks - 1
        self._batch_norms = list(refusals.batch_norms(model))
        self._parameters = self._let_go()
        self._norm = norm or GradientNorm(optimizers, link)
        self._norm.start(model)
        self._anchor = self._make_anchor(on_backward)
        for name, is_open in opened(model).items():
            module = model.get_submodule(name)
            if name:
                refusals.refuse_compiled_in_place(name, module)
                self._modules[name] = module, vars(module).get("forward")
                vars(module)["forward"] = self._routed(name, module, module.forward, is_open)
        model.forward = uncompiled(self.forward)
        give_whole_states(model, link)
        give_whole_optimizer_states(optimizers, link)

    def begin_section(
        self,
        layout: pipeline,
        optimizers: Optimizers,
        link: Link,
        record: PassRecord,
        norm: GradientNorm,
        on_backward: Callable[[], None],
    ) -> None:
        """Train the model with these optimizers from now on, over a link of the same ranks."""
        self._layout, self.record = layout, record
        self._link.waiting = link.waiting
        self._norm.close()
        self._norm = norm
        self._norm.start(self._model)
        self._anchor = self._make_anchor(on_backward)
        give_whole_optimizer_states(optimizers, self._link)

    @property
    def model(self) -> nn.Module:
        """Model that is split."""
        return self._model

    def fits(self, model: nn.Module) -> bool:
        """Return True if this is the model that was split, and it has the modules and parameters that it had then."""
        if model is not self._model:
            return False
        modules = {name: self._model.get_submodule(name) for name in opened(self._model) if name}
        before = {name: module for name, (module, _) in self._modules.items()}
        return modules == before and self._new_parameter() is None

    def _new_parameter(self) -> str | None:
        """Return the name of a parameter that came to the model after it was split."""
        if all(id(one) in self._known for one in self._model.parameters()):
            return None
        return next(name for name, one in self._model.named_parameters() if id(one) not in self._known)

    @torch.no_grad()
    def undo(self, optimizers: Optimizers, link: Link) -> None:
        """Give every rank the whole model again, and the whole state of these optimizers; all ranks call this."""
        self._link.waiting = link.waiting
        self._norm.close()
        states = {one: one.state_dict() for one in optimizers if "state_dict" in vars(one)}
        whole = self._model.state_dict()
        for name, tensor in (*self._model.named_parameters(), *self._model.named_buffers()):
            if is_held(tensor):
                continue
            if isinstance(tensor, nn.Parameter):
                take(tensor)
                tensor.data = whole[name].to(tensor.device, copy=True)
            else:
                hold_here(tensor)
                tensor.copy_(whole.get(name, tensor))
        for optimizer, state in states.items():
            del vars(optimizer)["state_dict"]
            optimizer.load_state_dict(state)
        del vars(self._model)["state_dict"]
        allow_objects(self._model)
        put_back(self._model, self._own_forward)
        for module, own in self._modules.values():
            put_back(module, own)

    def _make_anchor(self, on_backward: Callable[[], None]) -> Tensor:
        """Return an input of the operation whose gradient is 0, for ranks without a trained parameter.

        Backward passes reach it at all ranks: `on_backward` is called in each that sets gradients of parameters.
        """
        anchor = torch.zeros((), device=self._link.device)
        if any(one.requires_grad for one in self._model.parameters()):
            hooked: Any = anchor.requires_grad_()
            hooked.register_post_accumulate_grad_hook(lambda _: on_backward())
        return anchor

    def _let_go(self) -> list[nn.Parameter]:
        """Give up the memory of other stages' parameters; return this stage's."""
        own = []
        for name, parameter in self._model.named_parameters():
            if self._calls.stage_of(name, self._begins) == self._link.rank:
                own.append(parameter)
                take(parameter)
                continue
            let_go(parameter)
        for name, buffer in self._model.named_buffers():
            is_own = self._calls.stage_of(name, self._begins) == self._link.rank
            (hold_here if is_own else hold_elsewhere)(buffer)
        return own

    def _stage_of(self, call: int) -> int:
        return bisect_right(self._begins, call) - 1

    # --- calls of modules ---------------------------------------------------------------------------------------

    def _routed(self, name: str, module: nn.Module, inner: Forward, is_open: bool) -> Forward:
        """Return the replacement of a module's forward: compute, receive, send, or return a shape."""

        def call(*args: Any, **kwargs: Any) -> Any:
            turn = self._turn
            if turn is None:
                raise ModelError(refusals.called_alone(name))
            if turn.closed:
                return inner(*args, **kwargs)
            now = self._enter(turn, name)
            args, kwargs = mapped(RemoteTensor, received, args, kwargs)
            if now in self._begins:
                args, kwargs = self._cross(turn, now, args, kwargs)
            if is_open:
                return inner(*args, **kwargs)
            turn.closed = True
            try:
                if self._stage_of(now) != self._link.rank:
                    return self._shape(now, module, inner, args, kwargs)
                if any(isinstance(one, RemoteTensor) for one in leaves(args, kwargs)):
                    raise ModelError(refusals.needs_other(name))
                return inner(*args, **kwargs)
            finally:
                turn.closed = False

        return call

    def _enter(self, turn: _Turn, name: str) -> int:
        turn.now += 1
        expected = self._calls.names[turn.now] if turn.now < len(self._calls.names) else None
        if expected != name:
            raise ModelError(refusals.other_calls(name, expected))
        return turn.now

    def _cross(self, turn: _Turn, now: int, args: Any, kwargs: Any) -> Any:
        """Receive the input of this stage, or send that of the next one."""
        stage, (flat, shape) = self._stage_of(now), tree_flatten((args, kwargs))
        place = self._calls.cuts[now]
        tensor = flat[place]
        if stage == self._link.rank:
            if turn.coming is not None:
                incoming, turn.coming = turn.coming.wait(tensor.shape, tensor.dtype), None
                turn.input = incoming.requires_grad_(incoming.is_floating_point() and torch.is_grad_enabled())
            assert turn.input is not None
            tensor.value = flat[place] = turn.input.view_as(turn.input)
        elif stage == self._link.rank + 1:
            turn.sent = tensor
            if turn.sends:
                self._link.send(tensor, stage, FORWARD)
            flat[place] = remote(tensor)
        return tree_unflatten(flat, shape)

    def _shape(self, now: int, module: nn.Module, inner: Forward, args: Any, kwargs: Any) -> Any:
        """Return the shape of another stage's result, found once for each shape of its arguments."""
        known = tuple(
            kind_of(one) if isinstance(one, Tensor) else one if isinstance(one, int | float | str) else None
            for one in leaves(args, kwargs)
        )
        key = now, known, module.training
        if key not in self._shapes:
            args, kwargs = mapped(Tensor, remote, args, kwargs)
            with torch.no_grad():
                self._shapes[key] = tree_map_only(Tensor, remote, seen(inner(*args, **kwargs)))
        return repeated(self._shapes[key])

    # --- forward ------------------------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the model returns for a batch."""
        flat, shape = tree_flatten((args, kwargs))
        if any(isinstance(one, Tensor) and one.requires_grad for one in flat):
            raise ModelError(refusals.input_gradient())
        if torch.is_grad_enabled() and (name := self._new_parameter()) is not None:
            raise ModelError(refusals.new_parameter(name, "split into stages", refusals.AGAIN))
        turns = [_Turn(piece) for piece in self._pieces(flat)]
        self._passes += 1
        for number, turn in enumerate(turns):
            turn.seed = self._seed(number)
        kind = self._link.device.type
        autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        whole = _Pass(turns, shape, torch.is_grad_enabled(), autocast=autocast)
        outputs = _WholeModel.apply(self, whole, self._anchor, *self._parameters)  # type: ignore[no-untyped-call]
        flat = list(whole.rest)
        tensors = iter(outputs)
        assert whole.returned is not None
        return tree_unflatten([next(tensors) if isinstance(one, Tensor) else one for one in flat], whole.returned)

    def _seed(self, turn: int) -> int:
        """Return the seed of a turn, which differs at each rank. The script's random state is equal at all ranks."""
        text = f"{torch.initial_seed()}:{self._passes}:{turn}:{self._link.rank}"
        return seed_of(text.encode())

    def _pieces(self, flat: list[Any]) -> list[list[Any]]:
        """Return the arguments of each micro-batch."""
        found = pieces(flat, self._layout.micro_batches)
        if len(found) > 1 and self._batch_norms and self._model.training:
            raise ModelError(refusals.batch_norm(self._batch_norms[0], self._layout))
        return found

    def run(self, whole: _Pass) -> list[Tensor]:
        """Run the forward pass of all micro-batches, and return the outputs of the whole batch at all ranks."""
        if not self._is_first:
            for turn in whole.turns:
                turn.coming = self._link.receive(self._link.rank - 1, FORWARD)
        keeps = whole.with_gradients and not self._layout.recompute
        with kept_random_states(self._link.device):
            for turn in whole.turns:
                self._run_turn(turn, whole, keeps)
        self._link.flush()
        return self._outputs(whole)

    def _run_turn(self, turn: _Turn, whole: _Pass, keeps: bool) -> None:
        seed_for(self._link.device, turn.seed)
        args, kwargs = tree_unflatten(turn.flat, whole.shape)
        self._turn, turn.now = turn, 0
        try:
            with torch.set_grad_enabled(keeps), within_pass():
                found = self._plain(*args, **kwargs)
        finally:
            self._turn = None
        if turn.now + 1 < len(self._calls.names):
            raise ModelError(refusals.other_calls("nothing more", self._calls.names[turn.now + 1]))
        turn.outputs, whole.returned = tree_flatten(tree_map_only(RemoteTensor, received, seen(found)))
        if not keeps:
            turn.sent = turn.sent.detach() if turn.sent is not None else None

    def _outputs(self, whole: _Pass) -> list[Tensor]:
        """Return the outputs of all micro-batches, which the last rank has, as those of the whole batch."""
        whole.rest = whole.turns[0].outputs
        places = [place for place, one in enumerate(whole.rest) if isinstance(one, Tensor)]
        pieces = [[turn.outputs[place] for turn in whole.turns] for place in places]
        if len(whole.turns) > 1:
            _check_rows(whole, pieces)
        if not self._is_last:
            coming = [self._link.receive(self._link.ranks - 1, OUTPUT) for _ in places]
            shapes = [_joined_shape(each) for each in pieces]
            return [one.wait(shape, each[0].dtype) for one, shape, each in zip(coming, shapes, pieces, strict=True)]
        outputs = [each[0].detach() if len(each) == 1 else torch.cat([one.detach() for one in each]) for each in pieces]
        if any(isinstance(one, RemoteTensor) for one in outputs):
            raise ModelError(refusals.needs_other("the model"))
        for output in outputs:
            for rank in range(self._link.ranks - 1):
                self._link.send(output, rank, OUTPUT)
        self._link.flush()
        return outputs

    # --- backward -----------------------------------------------------------------------------------------------

    def run_back(self, whole: _Pass, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Return the gradients of this rank's parameters, given those of the outputs of the whole batch."""
        if whole.is_over:
            raise ModelError(refusals.second_backward())
        whole.is_over = True
        turns, trained = whole.turns, [one for one in self._parameters if one.requires_grad]
        sizes = [[len(one) for one in turn.outputs if isinstance(one, Tensor) and one.dim()] for turn in turns]
        cut = self._cut_gradients(gradients, sizes) if self._is_last else []
        coming = [] if self._is_last else [self._gradient_of(turn) for turn in turns[::-1]][::-1]
        with summed_gradients(trained, len(turns)) as total:
            for number in reversed(range(len(turns))):
                turn = turns[number]
                if self._layout.recompute:
                    self._repeat(turn, whole)
                if self._is_last:
                    outputs, given = [one for one in turn.outputs if isinstance(one, Tensor)], cut[number]
                else:
                    sent, incoming = turn.sent, coming[number]
                    outputs = [sent] if sent is not None and incoming is not None else []
                    given = [incoming.wait(one.shape, one.dtype) for one in outputs] if incoming is not None else []
                self._turn_back(turn, outputs, given, trained)
                turns[number] = _Turn([])
        self._link.flush()
        self._norm.follow()
        by_parameter = dict(zip(map(id, trained), total, strict=True))
        return [by_parameter.get(id(one)) for one in self._parameters]

    def _gradient_of(self, turn: _Turn) -> Incoming | None:
        """Begin to receive the gradient of what a turn has sent; None for whole numbers, which have none."""
        is_float = turn.sent is not None and turn.sent.is_floating_point()
        return self._link.receive(self._link.rank + 1, BACKWARD) if is_float else None

    def _cut_gradients(self, gradients: Sequence[Tensor], sizes: Sequence[Sequence[int]]) -> list[list[Tensor]]:
        if len(sizes) == 1:
            return [list(gradients)]
        cut = [torch.split(one, [size[place] for size in sizes]) for place, one in enumerate(gradients)]
        return [list(piece) for piece in zip(*cut, strict=True)]

    def _repeat(self, turn: _Turn, whole: _Pass) -> None:
        """Compute the activations of a turn again, with their history."""
        turn.sends = False
        if turn.input is not None:
            turn.input.requires_grad_(turn.input.is_floating_point())
        kind, dtype = self._link.device.type, whole.autocast
        with kept_random_states(self._link.device), torch.autocast(kind, dtype, enabled=dtype is not None):
            self._run_turn(turn, whole, keeps=True)

    def _turn_back(
        self, turn: _Turn, outputs: Sequence[Tensor], given: Sequence[Tensor], trained: Sequence[Tensor]
    ) -> None:
        """Compute the gradients of the trained parameters in a turn; send that of its input to the rank before."""
        pairs = [(output, gradient) for output, gradient in zip(outputs, given, strict=True) if output.requires_grad]
        sought = [one for one in (turn.input,) if one is not None and one.requires_grad]
        found: Sequence[Tensor | None] = [None] * len(sought)
        if pairs and (sought or trained):
            heads, tails = zip(*pairs, strict=True)
            found = torch.autograd.grad(heads, [*sought, *trained], tails, allow_unused=True)
        for one, gradient in zip(sought, found, strict=False):
            self._link.send(torch.zeros_like(one) if gradient is None else gradient, self._link.rank - 1, BACKWARD)


class _WholeModel(torch.autograd.Function):
    """The whole model as one operation of this rank's parameters."""

    @staticmethod
    def forward(ctx: Any, pipe: Pipeline, whole: _Pass, anchor: Tensor, *_parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.pipe, ctx.whole, ctx.anchor = pipe, whole, anchor
        with pipe.record.within() if whole.with_gradients else nullcontext():
            outputs = tuple(pipe.run(whole))
        ctx.mark_non_differentiable(*(one for one in outputs if not one.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise ModelError(refusals.second_derivative())
        with ctx.pipe.record.within(is_backward=True):
            found = ctx.pipe.run_back(ctx.whole, gradients)
            return (None, None, torch.zeros_like(ctx.anchor), *found)


def _check_rows(whole: _Pass, pieces: Sequence[Sequence[Tensor]]) -> None:
    """Raise ModelError unless all outputs have a row for each row of the micro-batch."""
    for each in pieces:
        for turn, one in zip(whole.turns, each, strict=True):
            rows = next(len(given) for given in turn.flat if isinstance(given, Tensor) and given.dim())
            refusals.refuse_other_rows(one, rows)


def _joined_shape(pieces: Sequence[Tensor]) -> torch.Size:
    first = pieces[0]
    return first.shape if len(pieces) == 1 else torch.Size([sum(len(one) for one in pieces), *first.shape[1:]])
