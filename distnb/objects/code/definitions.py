"""Functions and classes by value: how they are reduced and rebuilt, and which names they read.

The globals of a notebook's function are the notebook's namespace. The receiver gives the function its own namespace
instead, and the sender sends the names that the code reads separately, so the function sees their new values. A class
has an id. A receiver that knows the id updates the attributes of its own class, which keeps its identity.
"""

from __future__ import annotations

import dis
import enum
import functools
import linecache
import os
import sys
import types
import typing
import uuid
import weakref
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import cloudpickle

from distnb.compat import cloudpickle_internals
from distnb.objects.constructors import fill_class, make_class, make_function, make_named_type, make_type_alias
from distnb.objects.plain import is_importable, is_plain

__all__ = [
    "DYNAMIC",
    "DYNAMIC_ATTRIBUTES",
    "EMPTY",
    "NAMED_TYPES",
    "TYPE_ALIASES",
    "UNPICKLING",
    "Classes",
    "CodeNames",
    "CodePickler",
    "class_state",
    "content_of",
    "fill_cell",
    "function_state",
    "is_by_value",
    "is_code",
    "is_simple",
    "names_of_code",
    "own_names",
    "parts_of",
    "reduce_cell",
    "reduce_code",
    "reduce_class",
    "reduce_function",
    "reduce_named_type",
    "reduce_type_alias",
    "source_of",
]

DYNAMIC = frozenset({"dir", "eval", "exec", "globals", "locals", "vars"})
"""Code that uses one of these names may read any name."""

DYNAMIC_ATTRIBUTES = frozenset({"__globals__", "f_globals", "user_global_ns", "user_ns"})
"""Code that uses one of these attributes may read any name, too."""

UNPICKLING = frozenset({"Unpickler", "load", "load_from_checkpoint", "loads", "read_pickle"})
"""Code that uses one of these names may unpickle instances of any class."""

_GLOBAL_READS = frozenset(
    {"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_GLOBAL", "DELETE_NAME", "STORE_GLOBAL"}
)

_IMPORT_NAME = dis.opmap["IMPORT_NAME"]

# Attributes that replace `__annotations__` in a class since Python 3.14, or that compiling them leaves in a NamedTuple.
_OF_LAZY_ANNOTATIONS = frozenset({"__annotate_func__", "__annotations_cache__", "__classdictcell__"})

EMPTY: Any = object()
"""The content of a closure's cell before its first assignment."""

NAMED_TYPES: tuple[type, ...] = (typing.TypeVar, typing.ParamSpec, typing.TypeVarTuple, typing.NewType)
"""The types of type variables, and of what `typing.NewType` returns. They have an identity, like classes."""

TYPE_ALIASES: tuple[type, ...] = (getattr(typing, "TypeAliasType"),) if sys.version_info >= (3, 12) else ()  # noqa: B009
"""The type of what the statement `type` makes."""

_CODE = (types.FunctionType, type, functools._lru_cache_wrapper, *NAMED_TYPES, *TYPE_ALIASES)


def is_code(value: Any) -> bool:
    """Return whether a value is a function, a class or a type.

    Both sides send code by value, and before the values whose opening may need it.
    """
    kind = type(value)  # not `isinstance`: an object's `__class__` may be wrong, or raise
    return issubclass(kind, _CODE) or _is_alias(value)


def _is_alias(value: Any) -> bool:
    try:
        return typing.get_origin(value) is not None
    except Exception:  # whatever a user's class raises  # noqa: BLE001
        return False


# -- names ---------------------------------------------------------------------------------------------------------


class CodeNames(NamedTuple):
    """The names that a code object, with the code objects nested in it, may look up in its globals.

    Attributes:
        names: Global names that the code reads or deletes, or assigns after a `global` statement.
        attributes: All other names in the code. They show which submodules it uses.
        imports: The modules that `import` statements in the code name, also as `package.name` for each name that they
            import from a package.
    """

    names: frozenset[str]
    attributes: frozenset[str]
    imports: frozenset[str]

    @property
    def dynamic(self) -> bool:
        """True if the code may read any name."""
        return not DYNAMIC.isdisjoint(self.names) or not DYNAMIC_ATTRIBUTES.isdisjoint(self.attributes)


def own_names(code: types.CodeType) -> set[str]:
    """Return the global names that a code object itself uses, without those of nested code objects."""
    return {each.argval for each in dis.get_instructions(code) if each.opname in _GLOBAL_READS}


def _own_imports(code: types.CodeType) -> set[str]:
    """Return the modules that a code object itself imports, without those of nested code objects."""
    found: set[str] = set()
    if _IMPORT_NAME not in code.co_code[::2]:
        return found
    names: tuple[str, ...] = ()  # those that follow `from … import`, which the code loads right before
    for each in dis.get_instructions(code):
        if each.opname == "IMPORT_NAME":
            found.update((each.argval, *(f"{each.argval}.{name}" for name in names)))
        if each.opname != "EXTENDED_ARG":
            names = each.argval if type(each.argval) is tuple else ()
    return found


@functools.lru_cache(maxsize=4096)
def names_of_code(code: types.CodeType) -> CodeNames:
    """Return the names that a code object uses."""
    names = own_names(code)
    attributes = set(code.co_names)
    imports = _own_imports(code)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = names_of_code(constant)
            names |= inner.names
            attributes |= inner.attributes
            imports |= inner.imports
    return CodeNames(frozenset(names), frozenset(attributes), frozenset(imports))


def source_of(code: types.CodeType) -> tuple[str, str] | None:
    """Return (file name, text) of a code object whose source is in no file, such as a notebook cell; else None."""
    return _source(code.co_filename)  # cached by name, because code objects of several cells may be equal


@functools.lru_cache(maxsize=4096)
def _source(name: str) -> tuple[str, str] | None:
    entry = linecache.cache.get(name)
    if entry is None or len(entry) != 4 or os.path.exists(name):
        return None
    return name, "".join(entry[2])


def is_simple(value: Any) -> bool:
    """Return whether a function has no closure, no mutable default and no attribute."""
    return (
        type(value) is types.FunctionType
        and value.__closure__ is None
        and not value.__dict__
        and not value.__kwdefaults__
        and (value.__defaults__ is None or is_plain(value.__defaults__))
    )


def parts_of(value: Any) -> tuple[Any, ...] | None:
    """Return the parts of a simple function, or None. While they are equal, the function is unchanged."""
    if not is_simple(value):
        return None
    annotations = annotations_of(value)
    for each in annotations.values():
        if type(each) is not str and not (isinstance(each, type) and is_importable(each)):
            return None
    defaults = repr(value.__defaults__)  # 1 and True are equal, but not the same default
    return value.__code__, value.__name__, defaults, value.__doc__, tuple(annotations.items())


# -- functions -----------------------------------------------------------------------------------------------------


def reduce_function(function: types.FunctionType, user_ns: dict[str, Any]) -> Any:
    """Reduce a function to be pickled by value. Return NotImplemented for an imported one."""
    if is_importable(function):
        return NotImplemented
    args = (function.__code__, _globals_of(function, user_ns), function.__closure__)
    return make_function, args, function_state(function), None, None, fill_function


def _globals_of(function: types.FunctionType, user_ns: dict[str, Any]) -> dict[str, Any] | str | None:
    """Return a function's globals: None for the namespace, a module's name, or a dict of the globals that it reads."""
    found = function.__globals__
    if found is user_ns:
        return None
    module = sys.modules.get(found.get("__name__", ""))
    if module is not None and vars(module) is found:
        return module.__name__
    names = names_of_code(function.__code__).names  # `exec` has created the function in a dict of its own
    return {name: value for name, value in found.items() if name in names and name != "__builtins__"}


def function_state(function: types.FunctionType) -> dict[str, Any]:
    """Return the state of a function: everything except its code, closure and globals."""
    return {
        "__name__": _interned(function.__name__),
        "__qualname__": _interned(function.__qualname__),
        "__defaults__": function.__defaults__,
        "__kwdefaults__": function.__kwdefaults__,
        "__annotations__": annotations_of(function),
        "__doc__": function.__doc__,
        "__module__": _interned(function.__module__),
        "__dict__": function.__dict__,
    }


def reduce_code(code: types.CodeType) -> Any:
    """Reduce code with the name of its file, by which tracebacks and debuggers find its lines.

    cloudpickle leaves the name out since 3.1.3. Code that was compiled here and code that was unpickled have equal
    digests: strings are interned, and tuples of names, which code objects may share, are copied.
    """
    args = (getattr(code, name) for name in _ARGUMENTS_OF_CODE)
    return types.CodeType, tuple((*each,) if type(each) is tuple else _interned(each) for each in args)


_ARGUMENTS_OF_CODE = (
    *("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_nlocals", "co_stacksize", "co_flags", "co_code"),
    *("co_consts", "co_names", "co_varnames", "co_filename", "co_name", "co_qualname", "co_firstlineno"),
    *("co_linetable", "co_exceptiontable", "co_freevars", "co_cellvars"),
)
"""The attributes of code that its constructor takes, in its order."""


class CodePickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's pickler, except that code keeps the name of its file."""

    dispatch_table: ClassVar = ChainMap({types.CodeType: reduce_code}, cloudpickle.Pickler.dispatch_table)


def annotations_of(value: Any) -> dict[str, Any]:
    """Return the annotations of a function or class.

    Since Python 3.14 they are evaluated at the first read. If that fails, because a name does not exist yet, return
    them as strings.
    """
    try:
        found: dict[str, Any] = value.__annotations__
    except Exception:  # noqa: BLE001  (whatever evaluating them raises)
        import annotationlib  # type: ignore[import-not-found]

        found = annotationlib.get_annotations(value, format=annotationlib.Format.STRING)
    return found


def _interned(value: Any) -> Any:
    """Return a string as one interned object, and another value as it is. Equal but distinct strings change digests."""
    return sys.intern(value) if type(value) is str else value


def fill_function(function: types.FunctionType, state: dict[str, Any]) -> None:
    """Give a function its state."""
    for name, value in state.items():
        if name != "__dict__":
            setattr(function, name, value)
        elif value:
            function.__dict__.update(value)


def reduce_cell(cell: types.CellType) -> Any:
    """Reduce a closure's cell. Its content becomes the state, since the content may refer to the cell."""
    content = content_of(cell)
    return types.CellType, (), () if content is EMPTY else (content,), None, None, fill_cell


def content_of(cell: types.CellType) -> Any:
    """Return the content of a cell, or EMPTY before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:
        return EMPTY


def fill_cell(cell: types.CellType, content: tuple[Any, ...]) -> None:
    """Give a cell its content, if it had one."""
    for each in content:
        cell.cell_contents = each


def make_cache(function: Any, parameters: dict[str, Any]) -> Any:
    """Return a function with `functools.lru_cache` around it and an empty cache."""
    return functools.lru_cache(**parameters)(function)


# -- classes -------------------------------------------------------------------------------------------------------


class Classes:
    """The classes and type variables that this side has sent or received, by ids that both sides use.

    Attributes:
        new_id: Makes the id of a class that was never sent. All replicas make the same id for the same class.
    """

    def __init__(self) -> None:
        self.new_id: Callable[[Any], str] = lambda cls: uuid.uuid4().hex
        self._ids: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._classes: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()

    def __contains__(self, cls: object) -> bool:
        return isinstance(cls, type) and cls in self._ids

    def id_of(self, cls: Any) -> str:
        """Return a class's id. A class that was never sent gets a new id."""
        found = self._ids.get(cls)
        if found is None:
            found = self.new_id(cls)
            self.add(found, cls)
        return found

    def add(self, identity: str, cls: Any) -> None:
        """Record the id of a class."""
        self._ids[cls] = identity
        self._classes[identity] = cls

    def get(self, identity: str) -> Any:
        """Return the class of an id."""
        return self._classes.get(identity)


def is_by_value(cls: type) -> bool:
    """Return whether a class is sent by value, since it cannot be imported."""
    reduced = cloudpickle_internals.reduce_class(cls)
    return isinstance(reduced, tuple) and len(reduced) == 6


def reduce_class(cls: type, classes: Classes) -> Any:
    """Reduce a class to be pickled by value. Return NotImplemented for an imported one."""
    reduced = cloudpickle_internals.reduce_class(cls)
    if not isinstance(reduced, tuple) or len(reduced) < 6:
        return reduced
    make, args, *_ = reduced
    args = (*args[:-2], None, None)  # without cloudpickle's own id
    kind = "enum" if make is cloudpickle_internals.make_enum else "class"
    if kind == "class":
        # These attributes take effect only when the class is created; cloudpickle sets slots afterwards. cloudpickle
        # also creates the class from its bases as written, and the base `NamedTuple` would generate the class again.
        given = {name: cls.__dict__[name] for name in ("__slots__", "__orig_bases__") if name in cls.__dict__}
        given["__module__"] = _interned(cls.__module__)
        # The metaclass of typed dicts adds the base `dict` itself.
        bases = tuple(base for base in cls.__bases__ if base is not dict) if typing.is_typeddict(cls) else cls.__bases__
        args = (*args[:2], bases, {**args[3], **given}, *args[4:])
    where = None if "." in cls.__qualname__ else cls.__name__
    state = class_state(cls)
    return make_class, (classes.id_of(cls), kind, args, where), state, None, None, fill_class


def class_state(cls: type) -> dict[str, Any]:
    """Return a class's own attributes."""
    if issubclass(cls, enum.Enum):
        state: dict[str, Any] = cloudpickle_internals.enum_state(cls)[0]
    else:
        # cloudpickle omits an attribute that is the same object as the inherited one.
        own = {name: value for name, value in vars(cls).items() if name != "_abc_impl" and not name.startswith("__")}
        state = own | cloudpickle_internals.class_state(cls)[0]
    state.pop("__slotnames__", None)  # a cache that the pickling of an instance creates
    state.pop("__module__", None)  # set when the class is created
    if not _OF_LAZY_ANNOTATIONS.isdisjoint(vars(cls)):
        state = {name: value for name, value in state.items() if name not in _OF_LAZY_ANNOTATIONS}
        state["__annotations__"] = annotations_of(cls)
    if not state.get("__annotations__", True):
        del state["__annotations__"]  # reading the annotations of a class without any creates an empty dict
    if (
        "__static_attributes__" in state
    ):  # since Python 3.13; these names are also in the methods' code, which interns them
        state["__static_attributes__"] = tuple(map(_interned, state["__static_attributes__"]))
    if "__slots__" in state:
        del state["__slots__"]
        state = {name: value for name, value in state.items() if type(value) is not types.MemberDescriptorType}
    return state


def reduce_named_type(obj: Any, classes: Classes) -> Any:
    """Reduce a type variable or a `NewType`: by name if it can be imported, else with an id, like a class."""
    if (reduced := _by_name(obj)) is not None:
        return reduced
    args: tuple[Any, ...] = (obj.__name__,)
    keywords: dict[str, Any] = {}
    kind = type(obj)
    if kind is typing.NewType:
        args = (obj.__qualname__, obj.__supertype__)
    elif kind is not typing.TypeVarTuple:
        keywords = {"covariant": obj.__covariant__, "contravariant": obj.__contravariant__, "bound": obj.__bound__}
        args = (obj.__name__, *getattr(obj, "__constraints__", ()))
    return make_named_type, (classes.id_of(obj), kind, args, keywords, obj.__module__)


def reduce_type_alias(alias: Any) -> Any:
    """Reduce what the statement `type` makes: by name if it can be imported, else by its value."""
    if (reduced := _by_name(alias)) is not None:
        return reduced
    return make_type_alias, (alias.__name__, alias.__value__, alias.__type_params__)


def _by_name(obj: Any) -> Any:
    """Return the reduction of an object that its module has under its name, or None."""
    found, name = sys.modules.get(obj.__module__), obj.__name__
    if obj.__module__ == "__main__" or getattr(found, name, None) is not obj:
        return None
    return getattr, (found, name)
