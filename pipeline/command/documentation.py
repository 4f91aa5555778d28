"""The sentence under a field, read from the source of the class that declares it: nothing is described twice."""

import ast
import inspect
import textwrap
from functools import cache


@cache
def field_sentences(declared_by: type) -> dict[str, str]:
    """For every field of a class, the string that follows its declaration, on one line."""
    sentences: dict[str, str] = {}
    for ancestor in reversed(declared_by.__mro__[:-1]):
        body = ast.parse(textwrap.dedent(inspect.getsource(ancestor))).body[0]
        assert isinstance(body, ast.ClassDef)
        for declaration, follower in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(declaration, ast.AnnAssign)
                and isinstance(declaration.target, ast.Name)
                and isinstance(follower, ast.Expr)
                and isinstance(follower.value, ast.Constant)
                and isinstance(follower.value.value, str)
            ):
                sentences[declaration.target.id] = " ".join(inspect.cleandoc(follower.value.value).split())
    return sentences
