"""Parts that all our commands share: errors as one message and an exit code, options made from a settings class."""

from __future__ import annotations

import functools
import inspect
import io
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar, get_args

import typer
import uvloop
from pydantic import BaseModel

from node.command_group import CommandGroup
from node.config import NodeConfig
from node.data.sources import places_of
from node.machine.cores import keep_within_quota
from node.machine.environment import drop_service_links, unknown_in
from node.machine.home import at_home, paths_at_home
from node.machine.named import HUB, Use, require_use
from node.machine.open_files import take_open_files
from node.machine.processes import ending_beside_threads, without_named_locks
from node.watch.words import wrapped
from protocol.errors import INTERRUPTED, NO, NolocoError, UserError
from protocol.files.folders import settle_caches, settle_temporary_files
from protocol.files.keeping import FORMAT
from protocol.supervision import Work
from protocol.version import MINOR, PROTOCOL, own_version

T = TypeVar("T")
Command = TypeVar("Command", bound=Callable[..., Any])


def _print_version(wanted: bool) -> None:
    if wanted:
        program = own_version() or "of a copy that was not installed"
        print(f"noloco-node {program}, protocol {PROTOCOL}.{MINOR}, directories of format {FORMAT}")
        raise typer.Exit


Version = Annotated[
    bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
]


def run_async(coroutine: Work[T]) -> T:
    """Run on uvloop; an error that we raise on purpose is printed as it is, without a traceback."""
    try:
        take_open_files()
        result: T = uvloop.run(coroutine)
        return result
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    except NolocoError as error:
        coroutine.close()  # if it has not begun
        fail(error)


def fail(error: NolocoError) -> NoReturn:
    print(wrapped(f"error: {error}", sys.stderr), file=sys.stderr)
    sys.exit(error.exit_code if isinstance(error, UserError) else NO)


def doing(sentence: str) -> None:
    """Tell on standard error what a command is about to do, before it loads what takes seconds."""
    print(f"{sentence} …", file=sys.stderr, flush=True)


class App(typer.Typer):
    """A typer application whose help is in groups, and whose commands take ~ for a home folder in every path."""

    def __init__(self, **settings: Any) -> None:
        usual: dict[str, Any] = {
            "cls": CommandGroup,
            "context_settings": {"help_option_names": ["--help", "-h"]},
        }
        super().__init__(pretty_exceptions_enable=False, rich_markup_mode=None, **usual | settings)

    def __call__(self, *given: Any, **settings: Any) -> Any:
        without_named_locks()
        keep_within_quota(os.environ)
        drop_service_links(os.environ)
        if isinstance(
            sys.stdout, io.TextIOWrapper
        ):  # of a path or a text that is not UTF-8, as on standard error
            sys.stdout.reconfigure(errors="backslashreplace")
        with ending_beside_threads():
            return super().__call__(*given, **settings)

    def command(self, *given: Any, **settings: Any) -> Callable[[Command], Command]:
        register = super().command(*given, **settings)
        return lambda function: register(_where_it_runs(function)) and function

    def callback(self, *given: Any, **settings: Any) -> Callable[[Command], Command]:
        register, has_work = (
            super().callback(*given, **settings),
            bool(settings.get("invoke_without_command")),
        )
        return lambda function: register(_where_it_runs(function, has_work)) and function


def _where_it_runs(command: Command, has_work: bool = True) -> Command:
    """Have a command find the home folder in its paths, a place to write, and no variable that it cannot know.

    One that only leads on to another, whose help may be wanted, finds the first alone.
    """

    @functools.wraps(command)
    def settled(*given: Any, **settings: Any) -> Any:
        try:
            settings = {name: paths_at_home(value) for name, value in settings.items()}
            if has_work and not any(map(_leads_on, settings.values())):
                _require_uses(command, settings)
                settle_temporary_files(os.environ)
                settle_caches(os.environ)
                _tell_unknown(os.environ)
        except UserError as error:
            fail(error)
        return command(*given, **settings)

    return settled  # type: ignore[return-value]


def uses_of(command: Callable[..., Any]) -> Iterator[tuple[str, Use, str]]:
    """Yield each parameter of a command that is a path, what it is for, and its option or what stands for it."""
    for name, parameter in inspect.signature(command, eval_str=True).parameters.items():
        for use in [each for each in get_args(parameter.annotation) if isinstance(each, Use)]:
            described = get_args(parameter.annotation)[-1]
            # typer takes the first name that is given for a default
            words = [str(word) for word in (described.default, *(described.param_decls or ()))]
            flags = [word for word in words if word.startswith("--")] or ["--" + name.replace("_", "-")]
            is_option = isinstance(described, typer.models.OptionInfo)
            yield name, use, flags[0] if is_option else described.metavar or name.upper()


def _require_uses(command: Callable[..., Any], settings: Mapping[str, object]) -> None:
    for name, use, named in uses_of(command):
        value = settings.get(name)
        for path in value if isinstance(value, (list, tuple)) else [value]:
            if not isinstance(path, (Path, str)) or not path or str(path).startswith(HUB):
                continue
            if use is Use.TEXT:
                places_of([str(path)])
            else:
                require_use(at_home(path), use, named)


def _leads_on(value: object) -> bool:
    return (
        getattr(value, "invoked_subcommand", None) is not None
    )  # of a context, whose class typer does not show


def _tell_unknown(environment: MutableMapping[str, str]) -> None:
    """Warn of NOLOCO_… variables that no program knows, and take them out: children need not warn again.

    Raises `UserError` for a mistyped setting, which would be ignored.
    """
    unknown = list(unknown_in(environment, NodeConfig.model_fields))
    told = [f"{each.variable} is not a setting. {each.advice}" for each in unknown if each.is_mistyped]
    if told:
        raise UserError("\n".join(told))
    for each in unknown:
        print(f"warning: {each.variable} is not a setting. {each.advice}", file=sys.stderr)
        del environment[each.variable]


def options_from(
    settings: type[BaseModel], rare: Collection[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command one option per field of `settings`, named, typed and explained by the field.

    Those in `rare` are not in --help, but in --help-all. The command gets the options that were given as keyword
    arguments, None for the others.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        parameters = [
            p
            for p in inspect.signature(command, eval_str=True).parameters.values()
            if p.kind is not p.VAR_KEYWORD
        ]
        for name, field in settings.model_fields.items():
            kind, default = _option_type(field.annotation), field.default
            # in round brackets: what stands in square ones is markup to rich, and would not be shown
            shown = "" if default in ((), "", None) or isinstance(default, bool) else f" (default: {default})"
            hidden = name in rare and "--help-all" not in sys.argv
            option = typer.Option(help=f"{field.description}{shown}", show_default=False, hidden=hidden)
            uses = [use for use in field.metadata if isinstance(use, Use)]
            annotation = Annotated[(kind | None, *uses, option)]  # type: ignore[valid-type]
            parameters.append(
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            )
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        return command

    return decorate


def _option_type(annotation: object) -> type[object]:
    if "tuple" in str(annotation):
        return list[str]
    if "Path" in str(annotation):
        return Path
    return next((kind for kind in (int, float, bool) if annotation is kind), str)
