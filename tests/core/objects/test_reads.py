"""The names that a cell reads before it certainly assigns them: too many are harmless, too few are not."""

from __future__ import annotations

import builtins

import pytest

from distnb.objects.code.definitions import names_of_code
from distnb.objects.code.reads import names_read

_BUILTINS = frozenset(dir(builtins)) | {"get_ipython", "__annotations__"}


def reads(source: str) -> set[str]:
    return set(names_read(source).names) - _BUILTINS


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("x = 1\ny = x", ""),
        ("y = x", "x"),
        ("x = x + 1", "x"),
        ("x += 1", "x"),
        ("x[0] = 1", "x"),
        ("x.a = 1", "x"),
        ("x[i] += y", "x i y"),
        ("a = b = c\nd = a, b", "c"),
        ("(a, [b, *c]) = d\na, b, c", "d"),
        ("x: int = 1\nx", ""),
        ("x: T", "T"),
        ("del x", "x"),
        ("x = 1\ndel x\nx", "x"),
        ("import a.b, c as d\na, d, c", "c"),
        ("from m import f, g as h\nf, h, g", "g"),
        ("from m import *\nx", "x"),
        # branches
        ("if c:\n    x = 1\nx", "c x"),
        ("if c:\n    x = 1\nelse:\n    x = 2\nx", "c"),
        ("if c:\n    x = 1\nelse:\n    raise ValueError\nx", "c x"),
        ("x = 1 if c else d", "c d"),
        ("c and (x := 1)\nx", "c x"),
        ("(x := 1) and x", "x"),
        (
            "match v:\n    case [a, b]:\n        r = a\n    case {'k': k, **rest}:\n        r = k, rest\n    case _:\n        r = 0\nr",
            "v a k rest r",
        ),
        ("match v:\n    case K(a) if a > z:\n        r = 1\nr", "v K a z r"),
        # loops
        ("for i in xs:\n    y = i\ny, i", "xs y i"),
        ("for i in xs:\n    s = s + i", "xs s"),
        ("for i in range(3):\n    t = i\n    u = t", ""),
        ("while c:\n    x = 1\nx", "c x"),
        ("while True:\n    x = 1\n    break\nx", "x"),
        ("while True:\n    if c:\n        break\n    x = 1\nx", "c x"),
        ("for i in xs:\n    break\nelse:\n    x = 1\nx", "xs x"),
        ("for i in xs:\n    continue\n    y", "xs y"),
        # try and with
        ("try:\n    x = f()\nexcept E as e:\n    x = e\nx", "f E e"),  # it deletes `e`
        ("try:\n    x = f()\nexcept E:\n    pass\nx", "f E x"),
        ("try:\n    x = f()\nfinally:\n    y = 1\nx, y", "f"),
        ("try:\n    f()\nexcept E as e:\n    pass\ne", "f E e"),
        ("with a as b:\n    x = b\nx", "a"),
        ("with contextlib.suppress(E):\n    x = f()\nx", "contextlib E f x"),
        ("with s.scope():\n    model = make()\nmodel", "s make"),
        ("async with a as b:\n    await b", "a"),
        # comprehensions, lambdas
        ("[x for x in xs if x > t]", "xs t"),
        ("[x for x in xs]\nx", "xs x"),
        ("{k: v + w for k, v in d.items()}", "d w"),
        ("[y for x in xs for y in f(x)]", "xs f"),
        ("any((found := x) for x in xs)\nfound", "xs found"),
        ("f = lambda a, b=c: a + d", "c d"),
        ("sorted(xs, key=lambda x: x)", "xs"),
        # functions
        ("def f(a, b=c) -> T:\n    return a + g", "c T"),
        ("def f():\n    return g\nf()", "g"),
        ("def f():\n    return g\ng = 1\nf()", ""),
        ("def f():\n    return g()\ndef g():\n    return h\nf()", "h"),
        ("def f():\n    x = 1\n    return [x for _ in y]\nf()", "y"),
        ("@d\ndef f():\n    return g", "d g"),
        ("def f():\n    global n\n    n += 1\nf()", "n"),
        ("def f():\n    def inner():\n        return a, b\n    a = 1\n    return inner\nz = [f]", "b"),
        ("def fact(n):\n    return n * fact(n - 1)\nfact(3)", ""),
        ("async def f():\n    return x\nawait f()", "x"),
        ("f = lambda: g\nf()", "g"),
        ("def f():\n    return x\nf = None\nf", "x"),
        # classes
        ("class A(B, metaclass=M):\n    x = y\n    z = x", "B M x y"),
        ("class A:\n    def m(self):\n        return g\nA()", "g"),
        ("class A:\n    def m(self):\n        return A, g", ""),
        ("class A:\n    x = 1\nx", "x"),
        ("@deco\nclass A:\n    def m(self):\n        return g", "deco g"),
        # strings and IPython
        ("f'{a!r:>{w}} {{b}}'", "a w"),
        ("%time x = f(y)\nx", "time f x y"),
        ("%timeit -n 3 -r 2 f(y)", "timeit n r f y"),
        ("!echo {a} $b > c", "a b"),
        ("files = !ls {folder}\nfiles", "folder"),
        ("x?", "pinfo x"),
        ("%%time\ny = x\ny", "time x y"),
        ("%%capture out\nprint(x)\ny = x\ny", "capture out x y"),
        ("%cd {folder}", "cd folder"),
        ("%matplotlib inline", "matplotlib inline"),
        ("await task", "task"),
        ("not python at all", ""),
        ("", ""),
        ("\n\n# only a comment\n", ""),
    ],
)
def test_read_names_are_found(source: str, names: str) -> None:
    assert reads(source) == set(names.split())


@pytest.mark.parametrize(
    ("source", "dynamic"),
    [
        ("eval('x')", True),
        ("exec(code)", True),
        ("globals()['x']", True),
        ("sorted(locals())", True),
        ("def f():\n    return vars()\n", False),
        ("def f():\n    return eval('x')\nf()", True),
        ("%run script.py", True),
        ("%whos", True),
        ("model.eval()", False),
        ("x = 1", False),
    ],
)
def test_dynamic_reads_are_recognised(source: str, dynamic: bool) -> None:
    assert names_read(source).dynamic is dynamic


def test_attributes_include_submodules() -> None:
    found = names_read("torch.nn.functional.relu(x)\ndef f():\n    return xml.dom.minidom")
    assert {"nn", "functional", "relu", "dom", "minidom"} <= found.attributes


def test_imports_of_code_and_cells_are_found() -> None:
    text = """
def function():
    import os.path
    from package import part as p, other
    class Inner:
        def method(self):
            from .relative import x
"""
    wanted = {"os.path", "package", "package.part", "package.other"}
    assert names_of_code(compile(text, "", "exec")).imports == wanted | {"relative", "relative.x"}
    cell = "!ls\nfrom package import part as p, other\ntry:\n    import os.path\nexcept ImportError: pass"
    assert names_read(cell).imports == wanted
