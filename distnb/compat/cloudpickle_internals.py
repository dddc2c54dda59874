"""Private names of cloudpickle: its functions that reduce and rebuild classes."""

from __future__ import annotations

from distnb.compat.versions import private_names

with private_names("cloudpickle"):
    from cloudpickle.cloudpickle import _class_getstate as class_state
    from cloudpickle.cloudpickle import _class_reduce as reduce_class
    from cloudpickle.cloudpickle import _class_setstate as fill_class
    from cloudpickle.cloudpickle import _enum_getstate as enum_state
    from cloudpickle.cloudpickle import _make_skeleton_class as make_class
    from cloudpickle.cloudpickle import _make_skeleton_enum as make_enum

__all__ = ["class_state", "enum_state", "fill_class", "make_class", "make_enum", "reduce_class"]
