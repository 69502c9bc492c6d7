"""One worker's training: ties the script's loop, by hooks and the loader, to a recipe and a wire."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from stretto.errors import NotFiniteError, StaysOutError
from stretto.how import Scene
from stretto.members.ledger import Lease
from stretto.recipe import Recipe
from stretto.train import shadow
from stretto.train.advice import advice
from stretto.train.evaluation import Evaluate
from stretto.train.exchange import Arrivals, Weights
from stretto.train.free import FreeHands
from stretto.train.hand import Hand
from stretto.train.hands import Dealer, Hands, is_leasable, number_of
from stretto.train.journal import ADVICE, Journal, open_folder
from stretto.train.model import agree_on_model, part_random_states, plain_name, same_start
from stretto.train.presence import Presence, comes_late
from stretto.train.referee import Referee
from stretto.train.replica import Replica
from stretto.train.seat import Seat
from stretto.train.stopwatch import Stopwatch
from stretto.train.surroundings import Enough
from stretto.train.tally import Tally
from stretto.wire import Wire
from stretto.wire.server import ServerWire

CHECK_EVERY_ROUNDS = 100


class Trainer:
    """Everything that happens to one worker between `distribute` and the end of the script.

    `recipe` is None for a worker that is alone and exchanges nothing.
    """

    def __init__(
        self,
        seat: Seat,
        wire: Wire,
        model: nn.Module,
        optimizer: Optimizer,
        loader: Any,
        recipe: Recipe | None,
        evaluate: Evaluate | None,
        evaluate_every: int | None,
    ) -> None:
        self.model, self.optimizer, self.recipe = model, optimizer, recipe
        self.wire = wire
        if seat.opens_folder:
            seat = replace(seat, run=open_folder(self.wire, self._asked(seat)))
        is_late = comes_late(self.wire) or (isinstance(self.wire, ServerWire) and seat.life > 0)
        if is_late and not is_leasable(loader):
            raise StaysOutError("a stream that others are in the middle of can be taken up by nobody")
        self.loader = loader
        self.journal = Journal(seat.run, self.wire, seat.around, number_of(self.wire), comes_late(self.wire))
        self.watch = Stopwatch(seat.around.clock, self.journal.zero)
        if not comes_late(self.wire):
            agree_on_model(self.wire, model, recipe.spelled() if recipe else "")
            same_start(self.wire, model)
            part_random_states(self.wire)
        meet = evaluate_every * self.wire.workers if evaluate_every and evaluate else None
        when = recipe.when if recipe else None
        self.dealer = Dealer(loader, self.wire, seat.join, when, meet, seat.around, seat.rule, seat.workers)
        self.weights, self.arrivals = Weights(self.wire), Arrivals(self.wire)
        self.referee = Referee(self, seat, evaluate, self._evaluations(evaluate_every))
        self.steps = self.hands_done = self.rounds_done = self.passes = 0
        self.samples = self.own_samples = self.samples_before = 0
        self.turns = self.turns_before = 0
        """How often a hand was asked for: the ends of passes, which have none, count."""
        self.hands: Hands | None = None
        self.closing: Hands | None = None
        """Those of a pass whose books are being closed."""
        self.hand: Hand | None = None
        self._leases: list[Any] = []
        self._worked = 0
        """How many of these the optimizer has done a step with, or after."""
        self.settings = shadow.Settings(optimizer, seat.around.scalers)
        self._shadowing = False
        self._accumulated = False
        self._stepped_last = True
        """Whether the optimizer has stepped in the hand before."""
        self._steps_before = self._samples_sent = 0
        self._around = seat.around
        self._pace = seat.around.pace(self.watch, seat.slow)
        self._skips = seat.on_nan == "skip" and recipe is not None and recipe.asynchronous
        self.tally = Tally(self._scene(seat))
        self.replica = Replica(
            model,
            optimizer,
            recipe,
            self.wire,
            self.watch,
            self.journal,
            self.tally,
            self.weights,
            seat.around,
            self._pace,
            self._exchange_begins,
            self._exchange_ended,
            self._settle,
            self._skips,
        )
        optimizer.register_step_post_hook(self._after_step)
        self.presence = Presence(self, seat)
        self.dealer.members = self.presence.members
        self.presence.arrive()
        self._say_start(seat)
        for text in advice(recipe, optimizer) if recipe is not None and self.wire.workers > 1 else ():
            self.journal.notice(text)

    def _scene(self, seat: Seat) -> Scene:
        wire, journal = self.wire, self.journal
        return Scene(wire.worker, wire.workers, seat.seed or 0, clock=journal.t, notice=journal.notice)

    def _evaluations(self, every: int | None) -> int | None:
        """After how many steps to evaluate; None is at the end of each pass. A stream knows no common step."""
        if every is None or self.recipe is None or not self.recipe.asynchronous or self.dealer.leases:
            return every
        self.journal.notice(
            "nobody hands out a stream's batches, so workers that do not wait can't meet after so many: "
            "evaluate_every is left out, and the end of each pass is evaluated"
        )
        return None

    # --- passes -----------------------------------------------------------------------------------------------

    def begin_pass(self) -> None:
        """A pass over the loader begins; one that the script left early is ended first.

        A pass that was over before this worker came is empty.
        """
        self.end_pass()
        self.passes += 1
        if self.presence.is_over(self.passes):
            self.presence.pass_skipped()
            return
        self.replica.resume(own=False)
        self.replica.prepare()
        found = self.presence.found(self.passes)
        if found is None:
            self.samples_before, self.turns_before = self.samples, self.turns
        self.presence.pass_begins()
        with self.watch.on("loading"):
            self._pace.begin_pass()
            self.hands = self.dealer.deal(self.passes, found)
        if isinstance(self.hands, FreeHands):
            self.hands.finish, self.hands.meet = self.bring_all, self._meet
            self.hands.cut_made = self.presence.keeper.cut_made
            self.samples_before = (self.passes - 1) * self.hands.samples
        self.presence.pass_begun()

    def next_batch(self) -> Any:
        """End the hand before, and give this worker's next batch; None when the pass is over."""
        self.end_hand()
        if self.hands is None:
            return None
        while True:
            self.presence.rest()
            if self._around.sees_enough(self.hands_done, self.samples, self.journal.t()):
                raise Enough
            self.watch.switch("loading")
            hand = self.hands.next()
            self.turns += 1
            self.presence.dealt()
            self._meet(self.hands.meetings())
            if hand is None:
                self.watch.switch("other")
                if not self.end_pass(left=False):
                    continue
                if self._around.has_seen_enough():
                    raise Enough
                return None
            self._begin_hand(hand)
            if not hand.idle:
                self._pace.begin()
                self.watch.switch("computing")
                return hand.batch
            self.watch.switch("waiting")
            self._shadow(hand)
            self.end_hand()

    def end_pass(self, left: bool = True) -> bool:
        """All workers look at the agreed model, are compared, evaluated, and settle what they know of each other.

        False when the pass goes on, since somebody has died with work that was not exchanged; unless the script has
        `left` it.
        """
        if self.hands is None:
            return True
        self.end_hand(left=True)
        self.bring_all()
        if left and isinstance(self.hands, FreeHands):
            self.hands.leave()
        self.replica.look()
        if self.presence.reopens(self.hands) and not left:
            self.replica.resume()
            return False
        if self.replica.arrival is not None:
            self._count_all_samples()
        if not self.weights.is_carried:
            self.presence.keep_tail(self.hands)
        self._settle_leases()
        self.check("at the end of a pass")
        self.closing, self.hands = self.hands, None
        self.referee.close_pass(self.closing)
        if self.presence.keeper.is_told_to_save():
            self.presence.keeper.save()
        self.closing = None
        return True

    def bring_all(self) -> None:
        """Bring to a server what has not been sent yet, and wait until it is there."""
        if self.replica.arrival is not None:
            self._send(self.replica.arrival.finish)

    def bring_steps(self) -> None:
        """The same of what has been stepped with, where nothing is accumulated: the books say that it is done."""
        if self._stepped_last:
            self.bring_all()

    def _meet(self, times: int) -> None:
        """Meet the other workers, when that is due, evaluate what the server has, and save it if that is due, too."""
        for _ in range(times):
            self.look_together(self.referee.evaluate, called=True)
            self.presence.keeper.cut_made()

    def look_together(self, then: Callable[[], None], called: bool = False) -> None:
        """All workers that do not wait for each other look at what the server has, do this, and go on."""
        self.watch.switch("other")
        if self.replica.arrival is not None:
            self.replica.look(called)
        self._count_all_samples()
        then()
        self.replica.resume()

    def _count_all_samples(self) -> None:
        """Workers that do not wait for each other ask at meetings how far all are: who was dealt last knows."""
        mine = self.samples if self.dealer.leases else self.own_samples
        told = [struct.unpack("<q", one)[0] for one in self.wire.gather(struct.pack("<q", mine))]
        self.samples = max(told) if self.dealer.leases else sum(told)

    def finish(self) -> None:
        """The script is over: end what is open, and write the last words."""
        if not self.presence.left:
            self.end_pass()
            has_worked = self._has_anybody_worked()
            if self.replica.arrival is not None and has_worked:
                self.replica.look()
            self.referee.finish(has_worked)
            self.presence.keeper.finish(has_worked)
        self._write_outcomes()
        self.journal.write(
            "end", step=self.steps, samples=self.own_samples, training_s=self.training_s(), **self.measured()
        )
        self.journal.close()
        self.wire.close()

    def _has_anybody_worked(self) -> bool:
        """Whether there is something to look at in the end: where nobody waits one may have got no batch at all."""
        if self.replica.arrival is None:
            return bool(self.hands_done)
        return b"some" in self.wire.gather(b"some" if self.hands_done else b"none")

    def abandon(self) -> None:
        """The script has failed: keep what is known, and let nobody at a server wait for this worker."""
        self._write_outcomes()
        self.journal.flush()
        if isinstance(self.wire, ServerWire):
            self.wire.close()

    # --- hands ------------------------------------------------------------------------------------------------

    def _begin_hand(self, hand: Hand) -> None:
        self.hand = hand
        self.hands_done += 1
        if hand.total:
            self.weights.add(hand.own, hand.total, hand.parts)
        self.samples = self.samples_before + hand.handed
        self.own_samples += hand.own
        self._steps_before = self.steps
        self._accumulated = False
        if hand.lease is not None:
            self._leases.append(hand.lease)

    def end_hand(self, left: bool = False) -> None:
        """What follows on a hand at every worker alike: the end for the idle, an evaluation that is due, progress.

        `left` says that the script has left its pass in the middle of the hand.
        """
        if self.hand is None:
            return
        self.watch.switch("other")
        self._pace.go_on()
        hand, self.hand = self.hand, None
        self._stepped_last = hand.idle or self.steps > self._steps_before
        if not hand.idle:
            if left and len(self._leases) > self._worked:  # nothing will come of what the script left without a step
                self.own_samples -= hand.own
                del self._leases[self._worked :]
            if not left:
                self._make_up_for_a_skipped_step(hand)
            self._announce(hand, shadow.END)
            if hand.short:
                self.settings.tell(self.wire, hand.teller)
        if self.recipe is None:
            self._settle_leases()
        if self.replica.arrival is not None and self.steps > self._steps_before:
            self.replica.arrival.glance()
        if self.replica.gradients is not None and self.rounds_done % CHECK_EVERY_ROUNDS == 1:
            self.check(f"after exchange {self.rounds_done}")
        if self.replica.arrival is None:
            self.referee.evaluate_if_due()
        if self.journal.due():
            self._write_outcomes()
            self.journal.write("progress", step=self.steps, samples=self.own_samples, **self.measured())
            self.journal.flush()

    def _shadow(self, hand: Hand) -> None:
        """Follow what the others do in a hand that has no batch for this worker."""
        self._shadowing = True
        while (word := self._hear(hand)) != shadow.END:
            if word == shadow.EXCHANGE and self.replica.gradients is not None:
                self.replica.gradients.take_part()
            elif word == shadow.STEP:
                if self.replica.gradients is not None:
                    shadow.tell_gradients(self.wire, hand.teller, self._stepped())
                    self.optimizer.step()
                else:
                    self._count_step()
        self.settings.tell(self.wire, hand.teller)
        self._shadowing = False

    def _hear(self, hand: Hand) -> bytes:
        with self.watch.on("waiting"):
            return self.wire.tell(lambda: shadow.END, hand.teller)

    def _announce(self, hand: Hand | None, word: bytes) -> None:
        if hand is not None and hand.short and not self._shadowing:
            self.wire.tell(word, hand.teller)

    def accumulate(self, on: bool) -> None:
        """Hold exchanges back, or no longer: the script accumulates gradients."""
        self._accumulated = True
        if self.replica.gradients is not None:
            self.replica.gradients.paused = on

    def is_at_rest(self) -> bool:
        """Whether nothing that was computed waits to be exchanged, or to be stepped with."""
        return self.weights.is_carried and (self.hand is None) and self._stepped_last

    # --- steps and exchanges ----------------------------------------------------------------------------------

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """The optimizer's hook: a local step was done."""
        before = self.watch.switch("other")
        self._pace.go_on()
        if getattr(optimizer, "found_inf", None) is None and not self._skips:
            self._refuse_not_finite()
        self._announce(self.hand, shadow.STEP)
        if self.replica.gradients is not None and self.hand is not None and self.hand.short and not self._shadowing:
            shadow.tell_gradients(self.wire, self.hand.teller, self._stepped())
        self._count_step()
        self.watch.switch(before)

    def _count_step(self) -> None:
        self.steps += 1
        self._worked = len(self._leases)
        if self.hands is not None:
            self.hands.ask_ahead()
        if not self.replica.stepped(self.steps):
            return
        try:
            self._exchange()
        except NotFiniteError as error:
            raise NotFiniteError(f"{error}; step {self.steps}, worker {self.wire.worker}; {ADVICE}") from None
        if self.replica.arrival is None and self.rounds_done % CHECK_EVERY_ROUNDS == 1:
            self.check(f"after exchange {self.rounds_done}")

    def _exchange(self) -> None:
        if self.replica.arrival is not None:
            self._send(self.replica.arrival.run)
        else:
            self.replica.exchange()

    def _send(self, exchange: Callable[[int, list[Lease]], bool]) -> None:
        """Exchange with a server what has not been sent yet."""
        samples, leases = self._unsent()
        if not exchange(samples, leases):
            text = f"worker {self.wire.worker} left out an update with NaN or infinity: {samples} samples do not count"
            self.journal.write("notice", text=text)
            self.journal.flush()

    def _unsent(self) -> tuple[int, list[Lease]]:
        """The samples and the leases whose work no exchange has carried yet."""
        samples, self._samples_sent = self.own_samples - self._samples_sent, self.own_samples
        return samples, self._take_leases()

    def _take_leases(self) -> list[Lease]:
        """Those of the work since the last exchange, which carries it."""
        leases, self._leases, self._worked = self._leases, [], 0
        return leases

    def _exchange_begins(self) -> None:
        self._announce(self.hand, shadow.EXCHANGE)

    def _exchange_ended(self, blocked_s: float) -> None:
        self.rounds_done += 1
        if self.replica.arrival is not None:
            return
        self.arrivals.note(self.journal.t(), blocked_s)
        self.weights.carried()
        self.presence.carried()
        self._settle_leases()

    def _make_up_for_a_skipped_step(self, hand: Hand) -> None:
        """Count a step that a gradient scaler left out at this worker alone, lest the others wait for its exchange."""
        if self.replica.rounds is None or self.steps > self._steps_before or self._accumulated:
            return
        steps_each_hand = self.steps > 0 and self.steps == self.hands_done - 1
        if steps_each_hand or self._has_wild_gradient():
            self._announce(hand, shadow.STEP)
            self._count_step()

    def _has_wild_gradient(self) -> bool:
        found = (one.grad for one in self._stepped() if one.grad is not None)
        return any(not bool(torch.isfinite(grad.sum())) for grad in found)

    def _refuse_not_finite(self) -> None:
        """A NaN in the loss reaches the last parameter's gradient first; the optimizer has just used it."""
        last = next((one for one in reversed(self.optimizer.param_groups[-1]["params"]) if one.grad is not None), None)
        if last is None or math.isfinite(last.grad.sum()):
            return
        names = {id(one): plain_name(name) for name, one in self.model.named_parameters()}
        self.journal.flush()
        raise NotFiniteError(
            f"the loss became NaN or infinite: the gradient of {names[id(last)]} is not finite "
            f"at step {self.steps + 1} on worker {self.wire.worker}; {ADVICE}"
        )

    def _stepped(self) -> list[nn.Parameter]:
        return [one for group in self.optimizer.param_groups for one in group["params"]]

    # --- what is known ----------------------------------------------------------------------------------------

    def check(self, when: str) -> None:
        """Compare the replicas of all workers, which must be equal now."""
        if self.replica.check(when) and self.wire.worker == 0:
            self.journal.write("check", step=self.steps, round=self.rounds_done, equal=True)

    def training_s(self) -> float:
        """Seconds since the start, without those spent evaluating."""
        return round(self.journal.t() - self.watch.split()["evaluating"], 6)

    def measured(self) -> dict[str, Any]:
        """This worker's cumulative figures."""
        traffic = self.wire.traffic()
        arrival = self.replica.arrival
        held = {"held_s": round(arrival.held_s, 6)} if arrival is not None else {}
        return {
            **held,
            "rounds": self.rounds_done,
            "split": self.watch.split(),
            "bytes_sent": traffic.bytes_sent,
            "bytes_received": traffic.bytes_received,
            "bytes_counted": traffic.counted,
            **self.tally.figures(),
        }

    def _settle_leases(self) -> None:
        self._settle(self._take_leases())

    def _settle(self, leases: list[Lease]) -> None:
        if self.hands is not None:
            self.hands.settle(leases)

    def _write_outcomes(self) -> None:
        """Say which of this worker's updates were applied, and how stale they were."""
        arrival = self.replica.arrival
        if arrival is not None and arrival.outcomes:
            self.journal.write("applied", updates=arrival.outcomes)
            arrival.outcomes = []

    def _asked(self, seat: Seat) -> dict[str, Any]:
        return {
            "recipe": str(self.recipe) if self.recipe else None,
            "workers": seat.workers,
            "seed": seat.seed or 0,
            "alone": seat.alone,
            "join": seat.join,
            "threads": torch.get_num_threads(),
        }

    def _say_start(self, seat: Seat) -> None:
        self.journal.write(
            "start",
            workers=self.wire.workers,
            **self._around.facts(),
            device=str(next(self.model.parameters(), torch.empty(0)).device),
            threads=torch.get_num_threads(),
            recipe=str(self.recipe) if self.recipe else "alone",
            servers=self.recipe.shards if self.recipe else 0,
            at=round(self._around.clock(), 6),
        )
        if not self.dealer.leases and not (self.wire.workers == 1 and seat.join == 1):
            self.journal.notice(
                "the loader is a stream: every worker reads all of it and keeps one batch in "
                f"{self.wire.workers}; how often each sample counted can't be audited"
            )
        self.journal.flush()
