"""Help texts, shell completion, and the wording of errors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from msgspec.structs import replace
from typer.main import get_command

from stretto.cli import main
from stretto.cli.script_arguments import recipe_names, without
from stretto.errors import RecipeError
from stretto.launcher.config import server_notice
from stretto.launcher.resume_hint import left_in
from stretto.recipe.named import NAMED, diloco, local_sgd
from stretto.recipe.parser import parse
from stretto.run_config import RunConfig

OF_THE_APP = getattr(get_command(main.app), "commands")  # noqa: B009 (typer does not say that an app is a group)
COMMANDS = [name for name, command in OF_THE_APP.items() if not command.hidden]


@pytest.mark.parametrize("name", [*COMMANDS, None])
def test_every_help_has_panels_and_two_examples_of_its_command(
    name: str | None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert main.command([*([name] if name else []), "--help"]) == 0
    text = capsys.readouterr().out
    assert "╭─ Options" in text
    examples = re.findall(rf"^ (?:srun .*)?stretto {name or ''}.*$", text.partition("Examples:")[2], flags=re.M)
    assert len(examples) == 2


@pytest.mark.parametrize("name", ["run", "compare", "simulate"])
def test_options_are_in_panels_and_show_defaults_in_one_format(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main.command([name, "--help"]) == 0
    text = capsys.readouterr().out
    panels = re.split(r"╭─ ", text)
    assert {panel.partition(" ─")[0] for panel in panels} >= {"Workers and recipe", "Parameter server", "Output"}
    for panel in panels[3:]:
        for option in re.findall(r"│ (--.*?)(?=│ --|╰)", panel, flags=re.S):
            assert "[default: " in option or "<bool>" in option, option
    assert "; else " not in text


def test_shell_completion_is_offered_and_knows_the_recipes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.command(["--help"]) == 0
    assert "--install-completion" in capsys.readouterr().out
    assert recipe_names("local") == ["local_sgd"]
    assert recipe_names("") == list(NAMED)


def test_shell_completion_replies(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def complete(words: str) -> list[str]:
        monkeypatch.setenv("_STRETTO_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", str(len(words.split(" ")) - 1))
        with pytest.raises(SystemExit):
            main.command(["anything"])
        return capsys.readouterr().out.split()

    assert complete("stretto re") == ["report", "recipes"]
    assert complete("stretto run --recipe local") == ["local_sgd"]
    assert "--recipe" in complete("stretto run --re")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["rnu", "train.py"], "there is no command rnu; the nearest are run, "),
        (["join", "run", "--wrokers", "2"], "the nearest are --workers, "),
        (["recipes", "--jsno"], "the nearest are --json, "),
        (["simulate", "--netwrok", "x", "train.py"], "the nearest are --network, "),
    ],
)
def test_typo_names_the_three_nearest(line: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.command(line) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("stretto: ") == 1


def test_typo_in_a_recipe_names_the_three_nearest() -> None:
    with pytest.raises(
        RecipeError, match=r"no recipe or answer is called 'local_sdg'; the nearest are local_sgd, \w+, \w+"
    ):
        parse("local_sdg(every=2)")


def test_wrong_value_is_reported_as_it_was_typed() -> None:
    with pytest.raises(
        RecipeError, match=r"^every of local_sgd must be a whole number at least 1 or overhead\(0.1\), got 0\n"
    ):
        local_sgd(every=0)
    with pytest.raises(RecipeError, match=r"^outer_lr of diloco must be above 0, got -1\n") as raised:
        diloco(outer_lr=-1)
    assert "try: diloco(outer_lr=" in str(raised.value)
    with pytest.raises(
        RecipeError, match=r"^every of together must be a whole number at least 1 or overhead\(0.1\), got \"x\"\n"
    ):
        parse('Recipe(when=together(every="x"))')


def test_help_of_servers_says_how_they_change_a_recipe() -> None:
    said = server_notice(RunConfig(Path("train.py"), workers=2, recipe="allreduce", servers=2))
    assert said is not None and "makes Recipe(whom=server(shards=2)) of the recipe allreduce" in said
    assert server_notice(RunConfig(Path("train.py"), workers=2, recipe="async_sgd", servers=2)) is None
    assert server_notice(RunConfig(Path("train.py"), workers=2, recipe="allreduce")) is None


def test_stopped_run_prints_its_folder_its_page_and_the_command_to_continue(tmp_path: Path) -> None:
    words = ("-n", "4", "--recipe", "local_sgd(every=4)", "train.py", "--lr", "1")
    config = RunConfig(Path("train.py"), retyped=words)
    said = left_in(tmp_path, config)
    assert f"run folder: {tmp_path}" in said and f"stretto report {tmp_path}" in said
    assert "no checkpoint was written: the first is due after 10 minutes; --checkpoint-every 5m writes them" in said
    typed = left_in(tmp_path, replace(config, checkpoint_every="1h"))
    assert "no checkpoint was written; --checkpoint-every 5m writes them" in typed
    (tmp_path / "checkpoints" / "round-00000004").mkdir(parents=True)
    last = left_in(tmp_path, config).splitlines()[-1]
    again = f"stretto run --resume {tmp_path} -n 4 --recipe 'local_sgd(every=4)' train.py --lr 1"
    assert last == f"continue from the last checkpoint: {again}"


def test_command_to_continue_keeps_all_options_except_folders() -> None:
    line = ["-n4", "--out", "here", "--seed", "1", "--resume=old", "--out=there", "--quiet"]
    assert without(line, ("--out", "--resume")) == ["-n4", "--seed", "1", "--quiet"]
