"""Messages as frames of bytes: one small header, then raw buffers that are never copied twice.

Plain pickle is enough for a message of `wire.messages`. Objects of users (arguments, results, namespaces) are packed by
`distnb.objects`, and their buffers become frames without a copy. The most frequent messages hold plain values only, and
`marshal` writes and reads those several times as fast as pickle.
"""

from __future__ import annotations

import copyreg
import marshal
import pickle
from collections.abc import Callable, Sequence
from typing import Any

from distnb.errors import MessageError
from distnb.objects.packing import out_of_band

__all__ = ["decode", "encode", "give_codes", "give_plain_form"]

Frame = bytes | bytearray | memoryview

_TUPLE = ord("(")  # the first byte of a tuple that marshal has written; pickles begin with another
_VERSION = 2  # of marshal's format: without references, for which it would look up each object

_plain_forms: dict[type, tuple[int, Callable[[Any], tuple[Any, ...]]]] = {}
_messages: dict[int, Callable[[list[Any]], Any]] = {}


def give_plain_form(
    code: int, kind: type, plain: Callable[[Any], tuple[Any, ...]], message: Callable[[list[Any]], Any]
) -> None:
    """Let marshal write messages of a class, unless they hold other than plain values.

    Args:
        code: A number of the class's own.
        kind: The class.
        plain: Returns a message as a tuple.
        message: Returns the message of such a tuple.
    """
    _plain_forms[kind] = code, plain
    _messages[code] = message


def encode(message: Any) -> list[Frame]:
    """Return a message as frames, the header first."""
    form = _plain_forms.get(type(message))
    if form is not None:
        code, plain = form
        try:
            return [marshal.dumps((code, *plain(message)), _VERSION)]
        except ValueError:
            pass  # a value in it is not plain
    frames: list[Frame] = [b""]
    frames[0] = pickle.dumps(message, protocol=5, buffer_callback=out_of_band(frames))
    return frames


def decode(frames: Sequence[Frame]) -> Any:
    """Return the message in frames that `encode` returned. Pickles run code, so the frames must be authenticated.

    Raises:
        MessageError: The frames are no message.
    """
    try:
        if frames[0][0] == _TUPLE:
            code, *fields = marshal.loads(frames[0])
            return _messages[code](fields)
        return pickle.loads(frames[0], buffers=frames[1:])
    except Exception as error:
        raise MessageError(
            f"{len(frames)} frames arrived that are no message of distnb ({type(error).__name__}: {error}). "
            "Do notebook and engines run the same version?"
        ) from error


_FIRST_CODE = 0x646E6200  # far from the codes that other libraries choose


def give_codes(first: int, *found_by_name: Callable[..., Any]) -> None:
    """Let pickle write codes for classes and functions of small messages.

    Without codes, pickle imports the module of each class by its name, which is half of the time of a small message.
    With codes it does not: both processes must have called this function, with the same arguments.

    Args:
        first: The first code. Each module that calls this function has sixteen codes.
        found_by_name: The classes and functions.
    """
    for code, each in enumerate(found_by_name, _FIRST_CODE + first):
        copyreg.add_extension(each.__module__, each.__name__, code)
