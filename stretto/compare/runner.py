"""Makes the runs of a comparison, one after another, and keeps what is known on the disk after each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import msgspec

from stretto.compare.trials import Question, Trial, trials
from stretto.errors import LogError, StrettoError
from stretto.launcher.local import RunConfig
from stretto.launcher.local import run as run_order
from stretto.launcher.progress_display import ProgressDisplay
from stretto.report import run_log
from stretto.report.run_record import Record, record, unstarted

NAME = "compare.json"


class Teller(Protocol):
    """Who is told where the comparison is."""

    def begin(self, trial: Trial) -> ProgressDisplay: ...
    def end(self, trial: Trial, record: Record) -> None: ...
    def say(self, text: str) -> None: ...


class Comparison:
    """The runs of a question in a folder. `records` grows with every run, and so does compare.json."""

    def __init__(
        self,
        question: Question,
        folder: Path,
        teller: Teller,
        run: Callable[[RunConfig, ProgressDisplay], Path] = run_order,
    ) -> None:
        self.question, self.folder = question, folder
        self.trials = trials(question)
        self.records: dict[str, Record] = {}
        self._teller, self._run = teller, run
        self._save()

    def make(self) -> None:
        """Make all runs. One that fails is marked and the others go on; a target unheard of ends it all."""
        try:
            for trial in self.trials:
                self._try(trial)
                self._save()
                self._check_target()
        finally:
            for trial in self.trials:
                self._forget_states(trial)

    def failed(self) -> list[Record]:
        """The runs that failed."""
        return [one for one in self.records.values() if one["failed"]]

    def _try(self, trial: Trial) -> None:
        watch = self._teller.begin(trial)
        failed = None
        try:
            self._run(trial.order(self.question, self.folder), watch)
        except StrettoError as error:
            failed = str(error)
        self.records[trial.name] = self._record(trial, failed)
        self._measure_likeness(trial)
        self._teller.end(trial, self.records[trial.name])
        if failed:
            self._teller.say(failed)

    def _record(self, trial: Trial, failed: str | None) -> Record:
        try:
            found = record(self.folder / trial.name)
        except LogError as error:
            found = self._unread(trial, str(error))
        found |= {"folder": trial.name, "failed": failed or found["failed"], "recipe": trial.kind}
        if self.question.target and not found["failed"]:
            evaluations = run_log.read(self.folder / trial.name).of("evaluation")
            found["reached"] = self.question.target.reached(evaluations)
        return found

    def _unread(self, trial: Trial, failed: str) -> Record:
        return unstarted(
            recipe=trial.kind,
            workers=trial.workers,
            global_batch_of=trial.global_batch_of,
            seed=trial.seed,
            script=str(self.question.script),
            folder=Path(trial.name),
            failed=failed,
        )

    # How alike the models are

    def _measure_likeness(self, newest: Trial) -> None:
        """Compare what can be compared now that one more run is there; drop the states that have served."""
        for trial in self.trials:
            pair = {trial.name, trial.reference}
            if newest.name in pair and all(self._whole(name) for name in pair):
                self.records[trial.name] |= self._likeness(trial)
        self._forget_served(newest.seed)

    def _whole(self, name: str | None) -> bool:
        return name in self.records and not self.records[name]["failed"]

    def _likeness(self, trial: Trial) -> Record:
        from stretto.compare.model_distance import compared  # torch, which takes seconds to import

        assert trial.reference is not None
        try:
            return compared(self.folder / trial.name, self.folder / trial.reference)
        except LogError as error:
            self._teller.say(f"{trial.name} cannot be compared with {trial.reference}: {error}")
            return {"compared_with": trial.reference}

    def _forget_served(self, seed: int) -> None:
        """States are large: those go that no run to come is compared with."""
        needed = {name for t in self.trials if t.name not in self.records for name in (t.name, t.reference)}
        waiting = {t.name for t in self.trials if t.name in self.records and t.reference not in (None, *self.records)}
        for trial in self.trials:
            if trial.seed == seed and trial.name not in needed | waiting:
                self._forget_states(trial)

    def _forget_states(self, trial: Trial) -> None:
        shutil.rmtree(self.folder / trial.name / "states", ignore_errors=True)

    # What is kept

    def _check_target(self) -> None:
        """After the first whole run: does it know the metric of the target?"""
        whole = [one for one in self.records.values() if not one["failed"]]
        if self.question.target and len(whole) == 1:
            self.question.target.check(whole[0]["metrics"])

    def _save(self) -> None:
        kept = {"question": self.question.describe(), "runs": list(self.records.values())}
        path = self.folder / NAME
        unfinished = path.with_suffix(".unfinished")
        try:
            unfinished.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=2) + b"\n")
            os.replace(unfinished, path)
        except OSError as error:
            raise LogError(f"{path} cannot be written: {error.strerror}") from error
