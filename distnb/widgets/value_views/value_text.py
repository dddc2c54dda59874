"""A distributed value as text, for terminals and for front ends without pictures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from distnb.views.value_model import Folded, ValueModel, fold, parts, replicas_text
from distnb.views.wording import human_bytes, short_number
from distnb.widgets.value_views.histogram import figures
from distnb.wire.value_facts import Inspected

__all__ = ["value_text"]


def value_text(model: ValueModel) -> str:
    """Return a line for each part of the value. Equal components share a line."""
    lines = [model.title, *_lines("", model.components, model, "  ")]
    lines += [f"  {replicas_text((replica,))}: {why}" for replica, why in model.absent.items()]
    return "\n".join([*lines, *filter(None, [model.warning()]), *model.notes])


def _lines(name: str, components: Mapping[int, Inspected], model: ValueModel, indent: str) -> Iterator[str]:
    folded = fold(components)
    for group in folded:
        several = len(folded) > 1 or len(components) < model.size
        whose = f"{replicas_text(group.replicas)}: " if several else ""
        drift = "  ← drift" if model.is_mirrored and group.differs else ""
        yield f"{indent}{whose}{name + ' ' if name else ''}{_facts(group)}{drift}"
    for inner, each in parts(components):
        yield from _lines(inner, each, model, indent + "  ")
    left_out = max((each.left_out for each in components.values()), default=0)
    if left_out:
        yield f"{indent}  … and {left_out:,} more"


def _facts(group: Folded) -> str:
    what = group.what
    if not what.shape and what.parameters < 0:
        text = f"{what.type}, {what.text}" if what.items else what.text or what.type
        return " ".join([text, *filter(None, [what.note and f"({what.note})"])])
    shown = [what.type, what.shape, what.dtype, ", ".join(group.devices)]
    if what.parameters > 0:
        shown.append(f"{what.parameters:,} parameters")
    if what.nbytes > 1000:
        shown.append(human_bytes(what.nbytes))
    low, mean, high = figures(what.statistics)
    shown += [f"min {low} mean {mean} max {high}"] if low else []
    shown += [f"norm {short_number(what.norm)}"] if what.norm is not None else []
    shown += [f"grad norm {short_number(what.gradient_norm)}"] if what.gradient_norm is not None else []
    shown += [f"⚠ {group.broken}"] if group.broken else []
    shown += [f"({what.note})"] if what.note else []
    value = " ".join(what.text.split()) if what.parameters < 0 else ""
    return " ".join(filter(None, [*shown, value and f"= {value}"]))
