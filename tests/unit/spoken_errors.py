"""The errors that people meet at the command line, read from the code: where each is made, and what it says.

A message is written with … for each part that is put in. What stands at its beginning is followed to where it is
written: to a constant, a variable, what a function returns, what its callers give, or the error that it repeats.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
GAP = "…"
DEEPEST = 6  # steps from an error to the words of its message
FOLDERS = ("protocol", "node", "bootstrap")
Function = ast.FunctionDef | ast.AsyncFunctionDef


class Met(NamedTuple):
    """A message of an error, at the place that makes it."""

    file: str
    kind: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.file}: {self.text[:50]}"


class Place(NamedTuple):
    """Where an expression stands: its file, and the functions around it, the innermost last."""

    file: str
    within: tuple[Function, ...]


class Code:
    """What was parsed of the three packages."""

    def __init__(self, root: Path = ROOT) -> None:
        self.constants: dict[str, dict[str, ast.expr]] = {}
        self.functions: defaultdict[str, list[tuple[Place, Function]]] = defaultdict(list)
        self.calls: defaultdict[str, list[tuple[Place, ast.Call]]] = defaultdict(list)
        self.bases: dict[str, set[str]] = {}
        self.sentences: set[str] = set()  # all texts that are written in the code
        self._imported: dict[str, dict[str, str]] = {}
        for folder in FOLDERS:
            for path in sorted((root / folder).rglob("*.py")):
                file = path.relative_to(root).as_posix()
                tree = ast.parse(path.read_text(encoding="utf-8"))
                self.constants[file] = _constants(tree)
                self._imported[file] = _imports(tree)
                self._note(Place(file, ()), tree)

    def _note(self, place: Place, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            inner = place
            if isinstance(child, Function):
                inner = Place(place.file, (*place.within, child))
                self.functions[child.name].append((inner, child))
            elif isinstance(child, ast.ClassDef):
                self.bases[child.name] = {_name(base) for base in child.bases}
            elif isinstance(child, ast.Constant | ast.JoinedStr):
                self.sentences.add(tidy(self._written(child)))
            elif isinstance(child, ast.Call):
                self.calls[_name(child.func)].append((place, child))
            self._note(inner, child)

    @staticmethod
    def _written(text: ast.Constant | ast.JoinedStr) -> str:
        parts = text.values if isinstance(text, ast.JoinedStr) else [text]
        texts = [str(part.value) if isinstance(part, ast.Constant) else GAP for part in parts]
        return re.sub(r"%[.\d]*[a-z]", GAP, "".join(texts))

    def kinds_of(self, *kinds: str) -> set[str]:
        """These classes, and all that are made of them."""
        found = set(kinds)
        while more := {name for name, bases in self.bases.items() if bases & found} - found:
            found |= more
        return found

    def met(self, kind: str) -> Iterator[Met]:
        """What each place says that makes an error of exactly this kind."""
        for place, call in self.calls[kind]:
            for argument in call.args[:1]:
                for text in self.texts(argument, place):
                    yield Met(place.file, kind, tidy(text))

    def texts(self, said: ast.expr, place: Place, depth: int = 0) -> set[str]:
        """What the expression may say, … for what is not known before the program runs."""
        depth += 1
        found: set[str] = set()
        match said:
            case ast.Constant(value=value):
                found = {str(value)}
            case ast.JoinedStr(values=[first, *rest]):
                more = "".join(self._later(part, place.file) for part in rest)
                found = {_or_gap(begun) + more for begun in self._first(first, place, depth)}
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                more = GAP.join(sorted(self.texts(right, place, depth))[:1])
                found = {begun + more for begun in self.texts(left, place, depth)}
            case ast.IfExp(body=one, orelse=other):
                found = self.texts(one, place, depth) | self.texts(other, place, depth)
            case ast.Call(func=ast.Attribute(value=ast.Constant(), attr="join"), args=[listed]):
                found = self._joined(listed, place, depth)
            case ast.Call(func=ast.Attribute(value=text, attr="strip" | "rstrip")):
                found = self.texts(text, place, depth)
            case ast.Call(func=function) if depth < DEEPEST:
                found = self._returned(_name(function), place, depth)
            case ast.Name(id=name) if depth < DEEPEST:
                found = self._of_name(name, place, depth)
        return found or {GAP}

    def _first(self, part: ast.expr, place: Place, depth: int) -> set[str]:
        if not isinstance(part, ast.FormattedValue):
            return self.texts(part, place, depth)
        return {GAP} if part.conversion == ord("r") else self.texts(part.value, place, depth)

    def _later(self, part: ast.expr, file: str) -> str:
        """Of what is put in behind the beginning, only constants are known."""
        match part:
            case ast.FormattedValue(value=ast.Name(id=name)) if name.isupper():
                value = self._constant(name, file)
                return str(getattr(value, "value", GAP)) if _is_text(value) else GAP
            case ast.Constant(value=value):
                return str(value)
        return GAP

    def _joined(self, listed: ast.expr, place: Place, depth: int) -> set[str]:
        match listed:
            case ast.List(elts=[first, *rest]):
                return {f"{begun} {GAP if rest else ''}" for begun in self.texts(first, place, depth)}
            case ast.ListComp(elt=each):
                return self.texts(each, place, depth)
            case ast.Name(id=name):
                values = _assigned(name, place)
                return {text for value in values for text in self._joined(value, place, depth)}
        return {GAP}

    def _returned(self, name: str, place: Place, depth: int) -> set[str]:
        found = self.functions[name]
        nearest = [each for each in found if each[0].file == place.file] or found
        return {
            text
            for inner, function in nearest
            for node in ast.walk(function)
            if isinstance(node, ast.Return) and node.value is not None
            for text in self.texts(node.value, inner, depth)
        }

    def _of_name(self, name: str, place: Place, depth: int) -> set[str]:
        """A variable, an error that was caught, an argument, or a constant."""
        if values := _assigned(name, place):
            return {text for value in values for text in self.texts(value, place, depth)}
        for function in reversed(place.within):
            for handler in ast.walk(function):
                if isinstance(handler, ast.ExceptHandler) and handler.name == name:
                    kinds = {_name(part) for part in ast.walk(handler.type or handler)} & set(self.bases)
                    return {each.text for kind in kinds for each in self.met(kind)} if depth < 3 else {GAP}
            names = [argument.arg for argument in function.args.args]
            if name in names:
                return self._given(function, name, place.file, depth) if depth == 1 else {GAP}
        constant = self._constant(name, place.file)
        return self.texts(constant, place, depth) if constant is not None else {GAP}

    def _given(self, function: Function, name: str, file: str, depth: int) -> set[str]:
        """What the callers give for an argument that is the whole message."""
        names = [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]
        number, found = names.index(name), set()
        calls = self.calls[function.name]
        for caller, call in [each for each in calls if each[0].file == file] or calls:
            given = [keyword.value for keyword in call.keywords if keyword.arg == name]
            for value in given or call.args[number : number + 1]:
                found |= self.texts(value, caller, depth)
        return found

    def _constant(self, name: str, file: str) -> ast.expr | None:
        """Of this file, or of the one that it is imported from."""
        file = self._imported[file].get(name, file)
        return self.constants.get(file, {}).get(name)


def tidy(text: str) -> str:
    """In one line, without marks of Markdown; placeholders that meet are one, as FILE:LINE at a beginning."""
    text = re.sub(r"\s+", " ", text.replace("`", "")).strip()
    return re.sub(rf"^{GAP}(?:[^\w{GAP}]{{1,2}}{GAP}\]?)+", GAP, re.sub(f"{GAP}+", GAP, text))


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    found: dict[str, ast.expr] = {}
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                found[name] = value
            case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
                found |= {_name(name): value for name, value in zip(names, values, strict=True)}
    return found


def _imports(tree: ast.Module) -> dict[str, str]:
    """The file that each imported name is from."""
    return {
        alias.name: f"{node.module.replace('.', '/')}.py"
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for alias in node.names
    }


def _is_text(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _or_gap(begun: str) -> str:
    """Punctuation between placeholders says nothing."""
    return begun if re.search(r"\w", begun) else GAP


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _assigned(name: str, place: Place) -> list[ast.expr]:
    """What the innermost function gives the variable, in a loop over written rows, too."""
    found: list[ast.expr] = []
    for node in ast.walk(place.within[-1]) if place.within else ():
        match node:
            case ast.Assign(targets=[ast.Name(id=known)], value=value) if known == name:
                found.append(value)
            case ast.For(target=ast.Tuple(elts=targets), iter=ast.Tuple(elts=rows)):
                names = [_name(target) for target in targets]
                if name in names:
                    found += [row.elts[names.index(name)] for row in rows if isinstance(row, ast.Tuple)]
    return found
