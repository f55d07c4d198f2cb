"""What all our commands share: errors as one message and an exit code, options made from a settings class."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Annotated, NoReturn, TypeVar

import typer
import uvloop
from pydantic import BaseModel

from node.machine.open_files import take_open_files
from protocol.compatibility import PROTOCOL
from protocol.errors import NolocoError, UserError
from protocol.supervision import Work
from protocol.version import own_version

T = TypeVar("T")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"noloco-node {own_version() or 'of a copy that was not installed'}, protocol {PROTOCOL}")
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
        sys.exit(130)
    except NolocoError as error:
        coroutine.close()  # if it has not begun
        fail(error)


def fail(error: NolocoError) -> NoReturn:
    print(f"error: {error}", file=sys.stderr)
    sys.exit(error.exit_code if isinstance(error, UserError) else 1)


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
            annotation = Annotated[kind | None, option]  # type: ignore[valid-type]
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
    return next((kind for kind in (int, float, bool, Path) if annotation is kind), str)
