"""The stages of a worker's model: how they are chosen at its first forward pass, and its whole state."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary, ref

import msgspec
import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from stretto.checkpoint import state_transfer
from stretto.checkpoint.storage import State
from stretto.checkpoint.whole_state import joined, only_of
from stretto.errors import ModelError, explain
from stretto.parallel.calls import Calls, opened, put_back, record_calls
from stretto.parallel.measure import measured_costs, measured_hop, stage_memory
from stretto.parallel.meta_start import build, is_unbuilt
from stretto.parallel.micro_batches import micro_batch, refuse_mixing
from stretto.parallel.pass_record import PassRecord, memory_figures
from stretto.parallel.pipeline import Pipeline
from stretto.parallel.rank_parts import RankContext, RankParts, uncompiled
from stretto.parallel.refusals import refuse_indivisible
from stretto.parallel.remote_gradient import GradientNorm
from stretto.parallel.schedule import Batch, Boundary, Hop, pipeline_schedule
from stretto.parallel.split import Costs, Split, measured_split, named_split, next_best
from stretto.recipe.layout import pipeline
from stretto.strategies.model_sync import state_of
from stretto.strategies.parameter_view import hold_elsewhere, is_held

Number = TypeVar("Number", int, float)


class Chosen(msgspec.Struct, frozen=True):
    """The stages of a model, equal at all ranks of all workers."""

    layout: str
    calls: Calls
    begins: list[int]
    random_state: bytes
    """State of the random generator from which a model of the meta device gets its values."""


_CHOSEN = msgspec.msgpack.Decoder(Chosen)
_WITH_CHOICE = msgspec.msgpack.Decoder(tuple[bytes, Chosen | None])
_split_before: WeakKeyDictionary[nn.Module, tuple[Chosen, ReferenceType[Pipeline]]] = WeakKeyDictionary()
"""Modules of models that are split, which keep their pipelines: the next section continues with the same stages."""


class PipelineStages(RankParts):
    """The stages of a pipeline, chosen by rank 0 of the first worker when the script first calls the model."""

    keeps_exchanges = False

    def __init__(self, layout: pipeline, context: RankContext) -> None:
        self._layout, self._context, self._link = layout, context, context.link
        self._model, self._optimizers = context.model, context.optimizers
        self._notice, self._on_split = context.notice, context.on_split
        self._chosen: Chosen | None = None
        self._chooses_alone = False
        """True while the first worker alone may call the model, and all others wait for a message of it."""
        self._is_settled = True
        """False if the stages were chosen at a time at which their parameters could not be exchanged."""
        self._own_forward: Callable[..., Any] | None = None
        """The `forward` that the script has set for the model, in place of that of its class."""
        self._hooks: list[RemovableHandle] = []
        """Hooks of the optimizers."""
        self._random_state = torch.get_rng_state()
        self.rank = self._link.rank
        self._record = PassRecord(context.timer)
        self._norm = GradientNorm(self._optimizers, self._link)
        refuse_indivisible(self._model, self._optimizers, "split into stages")
        if self._link.ranks != layout.stages:
            raise ModelError(_other_ranks(layout, self._link.ranks))

    def begin(self, facts: Any) -> None:
        """Split the model as other workers have (`facts`), or else at its first forward pass."""
        codec = self._context.recipe.how if self._context.recipe is not None else None
        if codec is not None and not codec.encodes_parts_alike and self._context.workers > 1:
            self._notice(f"{codec} encodes the parameters of each stage apart, not those of the whole model")
        if self._continues_pipeline():
            return
        if facts is not None:
            self._apply(self._fitting(msgspec.convert(facts, Chosen, strict=False)))
            return
        for tensor in () if self._context.continues else (*self._model.parameters(), *self._model.buffers()):
            hold_elsewhere(tensor)  # nothing is exchanged before the stages are known
        self._own_forward = vars(self._model).get("forward")
        self._model.forward = _FirstCall(self._model, uncompiled(self._first_forward), self._own_forward)

        def refuse(*_: Any) -> None:  # a function, not a method: a copy of the model must not copy the stages
            self._refuse_without_values()

        self._model.register_state_dict_pre_hook(refuse)  # type: ignore[no-untyped-call]
        self._hooks = [one.register_step_post_hook(lambda *_: self._refuse_undivided()) for one in self._optimizers]

    def _continues_pipeline(self) -> bool:
        """Continue with the stages of the section before, and return True, if the model is the same as there.

        Pipelines of other models that have modules of this one are undone.
        """
        found = [_split_before[module] for module in self._model.modules() if module in _split_before]
        for pipe, chosen in {pipe: chosen for chosen, before in found if (pipe := before()) is not None}.items():
            if pipe.fits(self._model):
                self._chosen = chosen
                pipe.begin_section(
                    self._layout, self._optimizers, self._link, self._record, self._norm, self._context.on_backward
                )
                return True
            pipe.undo(self._optimizers, self._link)
            for module in pipe.model.modules():
                _split_before.pop(module, None)
        return False

    def _fitting(self, chosen: Chosen) -> Chosen:
        """Return stages that others have chosen. Raise ModelError if they are those of another model."""
        if other := sorted(set(chosen.calls.names) - opened(self._model).keys()):
            raise ModelError(
                explain(
                    f"the loaded state does not fit this model: {other[0]}",
                    got=f"a model without {', '.join(other[:3])}",
                    expected="the model of the other workers, or of the checkpoint",
                    to_type="the same script as before, with the same arguments",
                )
            )
        return chosen

    def facts(self) -> Any:
        """Return the stages, for workers that join and for checkpoints; None before they are chosen."""
        return msgspec.to_builtins(self._chosen) if self._chosen is not None else None

    def joined(self, state: State) -> State:
        """Return the state of the whole model at rank 0."""
        return joined([state, *(state_transfer.of_parts(*other) for other in self._collect(state))])

    def part_of(self, state: State) -> State:
        """Return the state without that of other stages' parameters."""
        if self._chosen is None:
            return state
        others = {str(place) for place, one in enumerate(self._optimizers.parameters) if not is_held(one)}

        def own(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            parts = ((name.split("/", 2), name, one) for name, one in tensors.items())
            return {name: one for (kind, *place), name, one in parts if kind != "optimizer" or place[0] not in others}

        each = {worker: (facts, own(tensors)) for worker, (facts, tensors) in state.own.items()}
        return State(only_of(state_of(self._model), state.facts), own(state.tensors), each)

    def joined_tensors(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors of all stages at rank 0."""
        others = (state_transfer.of_parts(*other).tensors for other in self._collect(State({}, tensors)))
        return functools.reduce(operator.or_, others, tensors)

    def _collect(self, state: State) -> list[tuple[bytes, list[Tensor]]]:
        return self._link.collect(*state_transfer.in_parts(state))

    def _refuse_without_values(self) -> None:
        if self._chosen is None and is_unbuilt(self._model):
            raise ModelError(
                explain(
                    "a model of the meta device has no values before its first call",
                    got="state_dict() before the first batch",
                    expected="a call of the model before, at all processes",
                    to_type="model(x), then model.state_dict()",
                )
            )

    def _refuse_undivided(self) -> None:
        """Raise ModelError after a step that no call of the model came before: every rank would train all of it."""
        if self._chosen is None:
            raise ModelError(
                explain(
                    "an optimizer has stepped, but the model was not called, so that it has no stages",
                    got=f"calls of parts of {type(self._model).__name__}, or of a method of it that is not forward",
                    expected="model(x), whose forward pass calls the parts",
                    to_type='model(x), or --layout "whole()"',
                )
            )

    def close(self) -> None:
        """Choose no stages after the end of the section."""
        for hook in self._hooks:
            hook.remove()
        if self._chosen is None:
            put_back(self._model, self._own_forward)

    # --- the first call of the model ----------------------------------------------------------------------------

    def _first_forward(self, *args: Any, **kwargs: Any) -> Any:
        put_back(self._model, self._own_forward)
        make = functools.partial(self._choose, args, kwargs, measured_hop(self._link), stage_memory(self._link))
        if self._chooses_alone:
            chosen = self._link.broadcast(make if self._link.rank == 0 else b"")
            self._apply(_CHOSEN.decode(chosen))
        while self._chosen is None:  # the worker that chooses may fail
            self._choose_together(make)
        return self._model.forward(*args, **kwargs)

    def take_part(self) -> None:
        """Choose the stages with workers that call the model for the first time, if there are any."""
        if self._chosen is None:
            self._choose_together(None)

    def _choose_together(self, make: Callable[[], bytes] | None) -> None:
        """Apply the choice of the first worker that calls the model; all workers take part, and some `make` one."""
        calls = self._context.gather(b"calls" if make is not None else b"")
        callers = [number for number, one in enumerate(calls) if one]
        if not self._link.broadcast(b"called" if callers else b""):  # rank 0 decides: a worker may fail in between
            return
        message = make if make is not None and self._link.rank == 0 else b""
        chosen = self._link.broadcast(self._context.broadcast(message, callers[0] if callers else 0))
        if chosen:
            put_back(self._model, self._own_forward)
            self._apply(_CHOSEN.decode(chosen))
            self._on_split()

    def of_first(self, broadcast: Callable[[Callable[[], bytes]], bytes], make: Callable[[], bytes]) -> bytes:
        """Return the message that the first worker makes, at all workers, with the stages if it chooses them for it."""
        if self._chosen is not None:
            return broadcast(make)

        def alone() -> bytes:
            self._chooses_alone = True
            try:
                return msgspec.msgpack.encode((make(), self._chosen))
            finally:
                self._chooses_alone = False

        found, chosen = _WITH_CHOICE.decode(broadcast(alone))
        if chosen is not None and self._chosen is None:
            put_back(self._model, self._own_forward)
            self._apply(chosen)
        self._is_settled = chosen is None
        return found

    def settle(self) -> None:
        """Exchange the parts of a model that was split for an evaluation."""
        if not self._is_settled:
            self._is_settled = True
            self._on_split()

    def _choose(self, args: Sequence[Any], kwargs: dict[str, Any], hop: Hop, memory: Sequence[int]) -> bytes:
        """Return the stages, at rank 0 of the first worker."""
        if not is_unbuilt(self._model):
            refuse_mixing(self._model, self._layout, args, kwargs, self._link.device)
        if hooked := [name for name, module in self._model.named_modules() if name and module._forward_hooks]:
            self._notice(
                f"forward hooks of {', '.join(hooked)} run in each micro-batch, and see values at one stage only"
            )
        part_args, part_kwargs = micro_batch(self._layout, args, kwargs)
        calls = record_calls(self._model, part_args, part_kwargs)
        names = self._layout.begins
        if names is not None:
            split = named_split(calls, names)
            self._notice(f"pipeline: {described(calls, split)}")
        else:
            device, m = self._link.device, self._layout.micro_batches
            costs = measured_costs(self._model, calls, part_args, part_kwargs, hop.byte_s, device, m)
            costs = replace(costs, memory=memory, together=1 if self._layout.recompute else m)
            split = measured_split(calls, costs, self._layout.stages)
            other = next_best(costs, sorted(calls.cuts), split)
            self._notice(f"pipeline: {described(calls, split, costs)}{_of_next(calls, other, costs)}")
            self._write_prediction(calls, costs, split, hop)
        random_state = self._random_state.numpy().tobytes()
        return msgspec.msgpack.encode(Chosen(str(self._layout), calls, list(split.begins), random_state))

    def _write_prediction(self, calls: Calls, costs: Costs, split: Split, hop: Hop) -> None:
        """Write an event with the predicted pass of a batch, beside which the report shows the measured one."""
        m = self._layout.micro_batches
        turns = [one + costs.between_s for one in by_stage(split.begins, costs.seconds)]
        boundaries = [Boundary(calls.sizes[first], hop, hop) for first in split.begins[1:]]
        schedule = pipeline_schedule(turns, boundaries, Batch(m, m * calls.output_bytes, hop))
        self._context.write(
            "stages",
            layout=str(self._layout),
            modules=[calls.names[first] or calls.names[1] for first in split.begins],
            micro_batches=m,
            predicted_s=round(schedule.seconds, 6),
            computing=[round(one, 6) for one in schedule.computing],
            activations=[costs.activations(stage) for stage in bounds(split.begins, len(costs.kept))],
            balance=round(balance(costs, split), 4),
        )

    def figures(self) -> dict[str, Any]:
        """Return the passes of this rank, and its memory, once the model is split."""
        if self._chosen is None:
            return {}
        memory = memory_figures(self._model, self._optimizers, self._link.device)
        return {"stage": self._record.figures(), "memory": memory}

    def _apply(self, chosen: Chosen) -> None:
        self._chosen = chosen
        random_state = torch.frombuffer(bytearray(chosen.random_state), dtype=torch.uint8)
        build(self._model, random_state, lambda name: chosen.calls.stage_of(name, chosen.begins) == self.rank)
        calls, begins = chosen.calls, chosen.begins
        parts = self._model, self._optimizers, self._layout, self._link
        pipe = Pipeline(*parts, calls, begins, self._record, self._norm, self._context.on_backward)
        for module in self._model.modules():
            _split_before[module] = chosen, ref(pipe)


class _FirstCall:
    """The first forward pass of a model, which splits it. A copy of the model runs its own, and is not split."""

    def __init__(self, model: nn.Module, call: Callable[..., Any], own: Callable[..., Any] | None) -> None:
        self._model, self._call, self._own = model, call, own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Split the model, and run it."""
        return self._call(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        """Return the forward pass of the copy."""
        copied = memo[id(self._model)]
        own: Callable[..., Any] = type(copied).forward.__get__(copied)
        return own if self._own is None else copy.deepcopy(self._own, memo)


def described(calls: Calls, split: Split, costs: Costs | None = None) -> str:
    """Return the stages in words, with their measured times and their balance."""
    shown = []
    for stage, (first, end) in enumerate(bounds(split.begins, len(calls.names))):
        name = calls.names[first] or calls.names[min(1, len(calls.names) - 1)]
        time_text = f" ({sum(costs.seconds[first:end]) * 1e3:.3g} ms)" if costs is not None else ""
        shown.append(f"stage {stage} from {name}{time_text}")
    text = ", ".join(shown)
    return text + (f"; balance {balance(costs, split):.2f}" if costs is not None else "")


def by_stage(begins: Sequence[int], values: Sequence[Number]) -> list[Number]:
    """Return the sum of the values of each stage's calls."""
    return [sum(values[first:end]) for first, end in bounds(begins, len(values))]


def bounds(begins: Sequence[int], calls: int) -> list[tuple[int, int]]:
    """Return the first call of each stage, and the first one after it."""
    return list(zip(begins, [*begins[1:], calls], strict=True))


def balance(costs: Costs, split: Split) -> float:
    """Return the time of a stage, if all were equal, as a share of the slowest one's."""
    return sum(costs.seconds) / len(split.begins) / max(split.slowest_s, 1e-12)


def _of_next(calls: Calls, other: Split | None, costs: Costs) -> str:
    if other is None:
        return "; there is no other split"
    return f"; next best: from {', '.join(calls.names[one] for one in other.begins[1:])}, {balance(costs, other):.2f}"


def _other_ranks(layout: pipeline, ranks: int) -> str:
    return explain(
        f"the layout is of {layout.stages} stages, and this worker has {ranks} ranks",
        got=f"{layout} for {ranks} ranks",
        expected="as many ranks as stages",
        to_type=f'stretto run -n {layout.stages} --layout "{layout}"',
    )
