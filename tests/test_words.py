"""Names of values are nouns: no variable or parameter is a function word such as "found" or "it"."""

import ast
from pathlib import Path

import jobrunner

PACKAGE = Path(jobrunner.__file__).parent
FUNCTION_WORDS = """
found it its about known made what why each there then here beside apart given asked
told seen taken held way ways some few often alike this that which who whose one ones
other others rest again
"""


def bound_words(path):
    words = []
    function_words = FUNCTION_WORDS.split()
    for node in ast.walk(ast.parse(path.read_text())):
        name = ""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            name = node.id
        elif isinstance(node, ast.arg):
            name = node.arg
        if name.strip("_") in function_words:
            words.append(f"{path}:{node.lineno}: {name}")
    return words


def test_values_are_named_by_nouns():
    words = []
    for path in sorted(PACKAGE.rglob("*.py")):
        words += bound_words(path)
    assert not words
