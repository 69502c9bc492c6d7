"""Options of the commands, made from the fields of `RunConfig`, and the file for `--config`."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, get_origin

import msgspec
import typer

from stretto.cli.script_arguments import SCRIPT_TYPED, Arguments, Script, nearest, recipe_names
from stretto.errors import LaunchError, explain
from stretto.host_list import parse as parse_hosts
from stretto.host_list import server_hosts
from stretto.masking import MASK
from stretto.run_config import OUTPUT, WORKERS, RunConfig, options
from stretto.units import seconds

Command = Callable[..., None]
VERSION = "stretto"
"""Key of `run.json` that no other file has; keys there that are no options describe the run."""
WITHOUT_OPTION = "stretto.without_option"
"""Key in a command's context: fields of the configuration that have no option of their own."""


def whole_number(text: str | float) -> int:
    """Return the number that was typed. Raises BadParameter."""
    try:
        return int(str(text))
    except ValueError:
        expected = "a whole number"
        problem = f"{text} is not a whole number"
        raise typer.BadParameter(explain(problem, got=text, expected=expected, to_type="4")) from None


def servers(text: str | float) -> tuple[int, str | None]:
    """Return the number of shards that was typed, and their hosts, if other ones are named. Raises BadParameter."""
    if "@" not in str(text):
        return whole_number(text), None
    try:
        hosts = server_hosts(str(text))
    except LaunchError as error:
        raise typer.BadParameter(str(error)) from None
    return sum(host.workers for host in parse_hosts(hosts)), hosts


def _place_servers(context: typer.Context, typed: tuple[int, str | None] | None) -> int | None:
    """Keep the hosts of the shards in the context; return the number of shards. Raises BadParameter."""
    if typed is None:
        return None
    count, hosts = typed
    if hosts is not None and not any(parameter.name == "hosts" for parameter in context.command.params):
        problem, got = f"stretto {context.info_name} starts nothing on other hosts", f"--servers of {hosts}"
        to_type = f"--servers {count}"
        raise typer.BadParameter(explain(problem, got=got, expected="a number of shards", to_type=to_type))
    context.meta.setdefault(WITHOUT_OPTION, {})["server_hosts"] = hosts
    return count


def duration(text: str | float) -> float:
    """Return the seconds of a time that was typed. Raises BadParameter."""
    duration_s = seconds(text) if isinstance(text, str) else float(text)
    if duration_s is None:
        expected = "a time such as 500ms, 10s, 2m"
        raise typer.BadParameter(explain(f"{text} is not a time", got=text, expected=expected, to_type="10s"))
    return duration_s


def option(name: str) -> Any:
    """Return the type of a command's parameter: that of a field of `RunConfig`, with its option."""
    kind, declared, _ = options()[name]
    settings: dict[str, Any] = {"parser": whole_number} if kind in (int, int | None) else {}
    settings |= {"parser": servers, "callback": _place_servers} if name == "servers" else {}
    settings |= {"parser": duration} if declared.metavar == "TIME" else {}
    settings |= {"autocompletion": recipe_names} if declared.completed_by_recipes else {}
    typer_option = typer.Option(
        *declared.names,
        metavar=declared.metavar,
        show_default=declared.default or True,
        help=declared.help,
        rich_help_panel=declared.heading,
        envvar=declared.variable,
        **settings,
    )
    return Annotated[kind, typer_option]


Quiet = Annotated[bool, typer.Option("--quiet", help="Show only the script's output.", rich_help_panel=OUTPUT)]


def json_option(what: str) -> Any:
    """Return the option --json, whose file is for this."""
    return typer.Option(
        "--json",
        metavar="FILE",
        show_default="none",
        help=f"File for {what}; - for the standard output.",
        rich_help_panel=OUTPUT,
    )


JsonTo = Annotated[Path | None, json_option("the run record")]


def configured(*names: str, file: bool = True, **defaults: Any) -> Callable[[Command], Command]:
    """Add the script, its arguments and the options of these fields of `RunConfig` to a command.

    The command is called with its context and the configuration. `defaults` differ for this command. With `file` it
    takes `--config`.
    """

    def decorate(command: Command) -> Command:
        def call(context: typer.Context, **values: Any) -> None:
            values.pop("file", None)  # read before the others: see _read_file
            fields = {name: values.pop(name) for name in ("script", *names)}
            args = tuple(values.pop("args") or ())
            command(context, RunConfig(args=args, **fields, **context.meta.get(WITHOUT_OPTION, {})), **values)

        declared = list(inspect.signature(command, eval_str=True).parameters.values())
        added = [
            _parameter("script", annotation=Script),
            _parameter("args", None, Arguments),
            *(_parameter(name, defaults.get(name, options()[name][2])) for name in names),
            *([_parameter("file", None, ConfigFile)] if file else []),
        ]
        return _signed(call, command, [declared[0], *added, *declared[2:]])

    return decorate


def with_options(command: Command) -> Command:
    """Make options of those parameters of a command that have the name of a field of `RunConfig`."""

    declared = inspect.signature(command, eval_str=True).parameters.values()
    parameters = [
        _parameter(parameter.name, parameter.default) if _is_field(parameter) else parameter for parameter in declared
    ]
    return _signed(command, command, parameters)


def _is_field(parameter: inspect.Parameter) -> bool:
    return parameter.name in options() and get_origin(parameter.annotation) is not Annotated


def _parameter(name: str, default: Any = inspect.Parameter.empty, annotation: Any = None) -> inspect.Parameter:
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation or option(name)
    )


def _signed(call: Command, command: Command, parameters: Sequence[inspect.Parameter]) -> Command:
    """Give a function the name and the help text of a command, and these parameters."""
    call.__doc__, call.__name__, call.__annotations__ = command.__doc__, command.__name__, {}
    keyword = inspect.Parameter.KEYWORD_ONLY
    call.__signature__ = inspect.Signature([parameter.replace(kind=keyword) for parameter in parameters])  # type: ignore[attr-defined]
    return call


def _read_file(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a file as defaults of the options. Raises LaunchError for a file that is no configuration."""
    if path is None:
        return None
    values = _content(path)
    parameter_by_key = {name: parameter.name for parameter in context.command.params for name in _keys(parameter)}
    if VERSION in values:
        values["workers"] = values.get("workers", 1) * values.pop("ranks", 1)
        hidden = (set(RunConfig.__struct_fields__) - set(options()) - {"script", "args"}) & values.keys()
        context.meta[WITHOUT_OPTION] = {name: values[name] for name in hidden}
        values = {name: value for name, value in values.items() if name in parameter_by_key}
    defaults = {
        parameter_by_key.get(name) or _refuse(path, name, parameter_by_key): value for name, value in values.items()
    }
    if context.meta.get(SCRIPT_TYPED):
        defaults = {name: value for name, value in defaults.items() if name not in ("script", "args", "module")}
    if any(MASK in str(word) for word in defaults.get("args") or ()):
        problem, expected = f"arguments that look like secrets are not in {path}", "the script and its arguments"
        to_type = f"--config {path} {defaults.get('script', 'SCRIPT')} ARGUMENTS"
        raise LaunchError(explain(problem, got=" ".join(defaults["args"]), expected=expected, to_type=to_type))
    context.default_map = defaults
    return path


def _keys(parameter: Any) -> Iterator[str]:
    """Yield the keys of an option in a file: the name of its field, and its long name on the command line."""
    yield parameter.name
    yield from (name.removeprefix("--").replace("-", "_") for name in parameter.opts if name.startswith("--"))


def _content(path: Path) -> dict[str, Any]:
    """Return the values of a file by name, without empty ones."""
    try:
        text = path.read_bytes()
        values = msgspec.json.decode(text) if path.suffix == ".json" else tomllib.loads(text.decode())
    except OSError as error:
        _refuse_file(path, error.strerror or str(error))
    except (msgspec.DecodeError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        _refuse_file(path, str(error))
    if not isinstance(values, dict):
        _refuse_file(path, "it holds no names")
    flat = values | (values.get("simulated") or {})
    return {name.replace("-", "_"): value for name, value in flat.items() if value is not None}


def _refuse_file(path: Path, why: str) -> Any:
    expected, to_type = (
        "a TOML file of options, or run.json of a run",
        "--config run.toml, with lines such as: workers = 4",
    )
    problem = f"{path} cannot be read: {why}"
    raise LaunchError(explain(problem, got=f"--config {path}", expected=expected, to_type=to_type))


def _refuse(path: Path, name: str, parameter_by_key: Mapping[str, Any]) -> Any:
    near = nearest(name, parameter_by_key)
    expected = f"names of options (the nearest are {', '.join(near)})"
    problem = f"{path} sets {name}, which is no option here"
    raise LaunchError(explain(problem, got=name, expected=expected, to_type=f"{near[0]} = ..."))


ConfigFile = Annotated[
    Path | None,
    typer.Option(
        "--config",
        metavar="FILE",
        show_default="none",
        help="TOML file of options, or run.json of a run to do again; options that are typed take precedence.",
        rich_help_panel=WORKERS,
        callback=_read_file,
        is_eager=True,
    ),
]
