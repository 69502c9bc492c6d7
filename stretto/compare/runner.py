"""Runs the trials of a comparison one after another, and saves the records to compare.json after each."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from stretto.compare.trials import Question, Trial, trials, without_global_batches
from stretto.data.shares import SPEED
from stretto.errors import LogError, StrettoError
from stretto.events import read_events
from stretto.launcher.local import run as run_order
from stretto.launcher.private_files import Kept, PrivateFiles
from stretto.launcher.progress_display import ProgressDisplay
from stretto.report.equal_samples import are_same
from stretto.report.run_record import Record, record, unstarted, write_json
from stretto.report.verdict import verdict
from stretto.run_config import RunConfig

NAME = "compare.json"
DRAWN = (
    "the loop is over numbers, and the script draws a batch for each: a single process can't train with several of "
    "them as one global batch, and is compared with the script's own batch alone"
)


class ProgressReporter(Protocol):
    """Interface to which a comparison reports its progress."""

    def begin(self, trial: Trial) -> ProgressDisplay: ...
    def end(self, trial: Trial, record: Record) -> None: ...
    def say(self, text: str) -> None: ...


class Comparison:
    """Trials of a question in a folder. Each run adds its record to `records` and to compare.json."""

    def __init__(
        self,
        question: Question,
        folder: Path,
        reporter: ProgressReporter,
        run: Callable[[RunConfig, ProgressDisplay], Path] = run_order,
    ) -> None:
        self.question, self.folder = question, folder
        self.trials = trials(question)
        self.records: dict[str, Record] = {}
        self._reporter, self._run_trial = reporter, run
        self._kept = Kept()
        self._first_failed: dict[str, str] = {}
        """Names of the first trials that failed with an error, by its text."""
        self._save()

    def run(self) -> None:
        """Run all trials. A failed run is marked and the next one starts.

        Raises LaunchError after the first finished run if it has no metric of the target's name.
        """
        try:
            self._answer(self.trials[0])
            if self._draws_batches(self.trials[0]):
                self.trials = without_global_batches(self.trials)
                self._reporter.say(DRAWN)
            for trial in self.trials[1:]:
                self._answer(trial)
        finally:
            for trial in self.trials:
                self._delete_states(trial)
            for sentence in self._kept.sentences(str(self.folder / "RUN" / "files")):
                self._reporter.say(sentence)

    def failed(self) -> list[Record]:
        """Return the records of the runs that failed."""
        return [record for record in self.records.values() if record["failed"]]

    def _draws_batches(self, trial: Trial) -> bool:
        """Return True if the script of a finished trial loops over numbers, and draws the batches itself."""
        if not self._is_finished(trial.name):
            return False
        return any(one.get("numbers") for one in read_events(self.folder / trial.name / "events.jsonl"))

    def _answer(self, trial: Trial) -> None:
        """Carry out a trial, and save its record."""
        self._try(trial)
        self._save()
        self._check_target()

    def _try(self, trial: Trial) -> None:
        display = self._reporter.begin(trial)
        failed = None
        files = PrivateFiles(self.folder / ".files", os.getcwd())
        files.make()
        config = replace(trial.config(self.question, self.folder), private_files=(self.folder / ".files").resolve())
        if (earlier := self._with_shares_of(trial)) is not None:
            config = replace(config, shares=str(self.folder / earlier))
        try:
            self._run_trial(config, display)
        except StrettoError as error:
            failed = str(error)
        finally:
            self._kept += files.keep(self.folder / trial.name / "files")
        self.records[trial.name] = self._record(trial, failed)
        self._measure_distances(trial)
        self._reporter.end(trial, self.records[trial.name])
        if failed:
            first = self._first_failed.setdefault(_cause(failed), trial.name)
            self._reporter.say(failed if first == trial.name else f"with the error of {first}")

    def _with_shares_of(self, trial: Trial) -> str | None:
        """Return the first finished trial with as many workers, whose shares by speed this one repeats, if any."""
        if trial.recipe is None or self.question.config.shares != SPEED:
            return None
        for other in self.trials[: self.trials.index(trial)]:
            is_alike = (other.workers, other.layout) == (trial.workers, trial.layout) and other.recipe is not None
            log = self.folder / other.name / "events.jsonl"
            if is_alike and self._is_finished(other.name) and any(one["event"] == "shares" for one in read_events(log)):
                return other.name
        return None

    def _record(self, trial: Trial, failed: str | None) -> Record:
        try:
            result = record(self.folder / trial.name)
        except LogError as error:
            result = self._without_log(trial, str(error))
        result |= {"folder": trial.name, "failed": failed or result["failed"], "recipe": trial.kind}
        if self.question.target and not result["failed"]:
            result["reached"] = self.question.target.reached(result["evaluations"])
        return result

    def _without_log(self, trial: Trial, failed: str) -> Record:
        return unstarted(
            recipe=trial.kind,
            workers=trial.workers,
            global_batch_of=trial.global_batch_of,
            seed=trial.seed,
            script=str(self.question.config.script),
            folder=Path(trial.name),
            failed=failed,
        )

    # Distances of models

    def _measure_distances(self, newest: Trial) -> None:
        """Compare the newest run with its reference, and with runs it is the reference of; delete unneeded states."""
        for trial in self.trials:
            pair = {trial.name, trial.reference}
            if newest.name in pair and all(self._is_finished(name) for name in pair):
                self.records[trial.name] |= self._distance(trial)
        self._delete_unneeded(newest.seed)

    def _is_finished(self, name: str | None) -> bool:
        return name in self.records and not self.records[name]["failed"]

    def _distance(self, trial: Trial) -> Record:
        """Return the fields on the distance of a model to its reference, after equal numbers of samples.

        If the two trained on different numbers, it is the last of the distances during training.
        """
        from stretto.compare.model_distance import compared  # torch, which takes seconds to import

        assert trial.reference is not None
        samples, reference_samples = (self.records[name]["samples"] for name in (trial.name, trial.reference))
        try:
            found = compared(self.folder / trial.name, self.folder / trial.reference)
        except LogError as error:
            self._reporter.say(f"{trial.name} cannot be compared with {trial.reference}: {error}")
            return {"compared_with": trial.reference}
        if are_same(samples, reference_samples):
            return found | {"compared_at": samples}
        last = found["distances"][-1] if found["distances"] else {}
        return found | {
            "compared_at": last.get("samples"),
            **{name: last.get(name) for name in ("parameter_distance", "prediction_disagreement")},
        }

    def _delete_unneeded(self, seed: int) -> None:
        """Delete the saved states, which are large, of runs that no later run is compared with."""
        needed = {name for t in self.trials if t.name not in self.records for name in (t.name, t.reference)}
        waiting = {t.name for t in self.trials if t.name in self.records and t.reference not in (None, *self.records)}
        for trial in self.trials:
            if trial.seed == seed and trial.name not in needed | waiting:
                self._delete_states(trial)

    def _delete_states(self, trial: Trial) -> None:
        shutil.rmtree(self.folder / trial.name / "states", ignore_errors=True)

    # compare.json

    def _check_target(self) -> None:
        """Raise LaunchError if the first finished run has no metric of the target's name."""
        finished = [record for record in self.records.values() if not record["failed"]]
        if self.question.target and len(finished) == 1:
            self.question.target.check(finished[0]["metrics"])

    def described(self) -> dict[str, object]:
        """Return the question, the records of the runs, and the verdict on the runs so far."""
        records = list(self.records.values())
        return {
            "question": self.question.describe(),
            "runs": records,
            "verdict": verdict(records, self.question.target),
        }

    def _save(self) -> None:
        write_json(self.folder / NAME, self.described())


def _cause(failed: str) -> str:
    """Return the text of an error without its worker and its traceback."""
    text, _, _ = failed.partition("\nTraceback")
    return text.partition(" failed: ")[2] or text
