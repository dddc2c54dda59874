"""The optimizers whose update of an element depends on it alone, so that parts of a parameter can be updated apart."""

from __future__ import annotations

from distnb.errors import OptionError

__all__ = ["is_elementwise", "not_known_elementwise"]

_TORCH = frozenset(
    {"ASGD", "Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"}
) | {"SparseAdam"}
_KERAS = frozenset(
    {"Adadelta", "Adagrad", "Adam", "Adamax", "AdamW", "Ftrl", "Lion", "Nadam", "RMSprop", "SGD", "ScheduleFreeAdamW"}
)
_WRAPPERS = frozenset({"BaseOptimizer"})  # a Keras optimizer without an update of its own leaves it to another one
# By the method that computes an update: the library's module, and its classes.
_KNOWN = {"step": ("torch.optim.", _TORCH), "update_step": ("keras.", _KERAS | _WRAPPERS)}


def is_elementwise(cls: type) -> bool:
    """Return whether an optimizer's update of an element depends on no other element of the parameter.

    Args:
        cls: The optimizer's class. It may declare `is_elementwise = True` itself; other classes that torch and Keras do
            not define are not known to be elementwise.
    """
    declared = getattr(cls, "is_elementwise", None)
    if declared is not None:
        return bool(declared)
    for method, (module, names) in _KNOWN.items():
        owner = next((base for base in cls.__mro__ if method in vars(base)), None)
        if owner is not None:
            return f"{owner.__module__}.".startswith(module) and owner.__name__ in names
    return False


def not_known_elementwise(cls: type, parameter: str, cure: str) -> OptionError:
    """Return the error for an optimizer of a divided parameter that is not known to be elementwise.

    Args:
        cls: The optimizer's class.
        parameter: The divided parameter, and by what it is divided, as the object of a sentence.
        cure: The alternative to another optimizer, as an order.
    """
    name = cls.__name__
    return OptionError(
        f"{name} cannot update {parameter}: its update of an element depends on the other elements, or is not known to "
        f"be independent of them. Use Adam, AdamW, SGD or another optimizer that treats each element separately, or "
        f"{cure}. If {name} does that, declare it: {name}.is_elementwise = True."
    )
