"""The facts that a process sends about its values, for others to draw; never the values. Loads no torch."""

from __future__ import annotations

from typing import Literal, NamedTuple

__all__ = ["BINS", "PLACEMENT", "VALUE", "Bounds", "Holding", "Inspected", "Kind", "Statistics"]

VALUE = "application/vnd.distnb.value"
"""What a replica displays of a distributed value. The notebook puts those of all replicas together, and draws."""

PLACEMENT = "application/vnd.distnb.placement"
"""What a replica displays of where a value is, likewise."""

BINS = 24
"""Bars of a histogram."""


class Statistics(NamedTuple):
    """Statistics of a tensor's elements; of complex numbers, their absolute values.

    Attributes:
        elements: How many it has.
        low, high, mean: Of the finite ones; nan where there are none.
        norm: Euclidean, over all; of a sample, what it lets expect.
        nans, infinities: How many of those that were looked at are.
        histogram: How many lie in each of `BINS` equal parts of low to high; empty where these are equal.
        sampled: The number of elements that these statistics are of; below `elements`, an evenly spread sample.
    """

    elements: int
    low: float
    high: float
    mean: float
    norm: float
    nans: int
    infinities: int
    histogram: tuple[int, ...]
    sampled: int


class Inspected(NamedTuple):
    """A part of a value, with its facts.

    Attributes:
        type: Its class.
        text: Its value, if that is short.
        shape, dtype, device: Of tensors and arrays, else "". The shape is the whole's, of a DTensor, too.
        nbytes: What its tensors take here.
        content: A number that is equal for equal contents; 0 if unknown, or if each replica has its own.
        statistics: Of tensors.
        picture: A data URL.
        items: Its parts by name.
        left_out: Parts that are not among these.
        parameters: Of a module or its tensors: how many numbers are trained; -1 for other values.
        norm, gradient_norm: Of these; None where there is none.
        note: What else there is to say.
    """

    type: str
    text: str = ""
    shape: str = ""
    dtype: str = ""
    device: str = ""
    nbytes: int = 0
    content: int = 0
    statistics: Statistics | None = None
    picture: str = ""
    items: tuple[tuple[str, Inspected], ...] = ()
    left_out: int = 0
    parameters: int = -1
    norm: float | None = None
    gradient_norm: float | None = None
    note: str = ""


Bounds = tuple[tuple[int, int], ...]
"""Of each axis, the first place that a part has, and the one behind its last."""

Kind = Literal["copy", "own", "rows", "shard", "partial", "shared", "stored"]


class Holding(NamedTuple):
    """A part of a tensor, in one place.

    Attributes:
        name: Which tensor of the value: what one writes behind the value's name; "" for itself.
        whole: The shape of all parts together.
        bounds: The bounds of the part, or None if they are unknown.
        kind: "copy": equal on all replicas, and kept so. "own": this process's. "rows": of a global batch. "shard": of
            a DTensor; "partial": its sum over the replicas is the value. "shared": memory that all replicas have in
            common. "stored": on a parameter server.
        dtype, device: As torch writes them; "" where they are not known yet.
        nbytes: What it takes there.
        holder: The process that has it, if not the sender: "ps 0".
        note: What else there is to say.
    """

    name: str
    whole: tuple[int, ...]
    bounds: Bounds | None
    kind: Kind
    dtype: str = ""
    device: str = ""
    nbytes: int = 0
    holder: str = ""
    note: str = ""
