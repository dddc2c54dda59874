"""Signatures of objects on the engines, from their text."""

from __future__ import annotations

import ast
import inspect
from typing import Any

__all__ = ["parse_signature"]


class _Shown:
    """A default value of which only the text is known."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def parse_signature(text: str) -> inspect.Signature:
    """The signature that has this text.

    Raises:
        AttributeError: It has none that Python could read again.
    """
    try:
        tree = ast.parse(f"def function{text}: ...").body[0]
    except SyntaxError:  # a default whose repr is no expression
        raise AttributeError("__signature__") from None
    assert isinstance(tree, ast.FunctionDef)
    arguments = tree.args
    kinds = inspect.Parameter
    positional: list[tuple[ast.arg, Any]] = [(argument, kinds.POSITIONAL_ONLY) for argument in arguments.posonlyargs]
    positional += [(argument, kinds.POSITIONAL_OR_KEYWORD) for argument in arguments.args]
    without = len(positional) - len(arguments.defaults)
    defaults: list[Any] = [None] * without + list(arguments.defaults)
    parameters = [
        _parameter(argument, kind, default) for (argument, kind), default in zip(positional, defaults, strict=True)
    ]
    if arguments.vararg:
        parameters.append(_parameter(arguments.vararg, kinds.VAR_POSITIONAL, None))
    parameters += [
        _parameter(*pair[:1], kinds.KEYWORD_ONLY, pair[1])
        for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    if arguments.kwarg:
        parameters.append(_parameter(arguments.kwarg, kinds.VAR_KEYWORD, None))
    return inspect.Signature(parameters)


def _parameter(argument: ast.arg, kind: Any, default: ast.expr | None) -> inspect.Parameter:
    shown: Any = inspect.Parameter.empty if default is None else _Shown(ast.unparse(default))
    annotation: Any = (
        inspect.Parameter.empty if argument.annotation is None else _Shown(ast.unparse(argument.annotation))
    )
    return inspect.Parameter(argument.arg, kind, default=shown, annotation=annotation)
