"""Tools of one's own, for --environment tools: functions whose types and docstrings tell the policy how to call them.

    --tools examples/tools.py:calculate,examples/tools.py:search

Whatever a function returns is what the policy reads, and so is what it raises."""

from __future__ import annotations

import ast
import math
import operator
import os
import re
from pathlib import Path
from typing import Any

OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


def calculate(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: Such as (3 + 4) * sqrt(2).
    """

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Expression(body):
                return value(body)
            case ast.Constant(int() | float() as number):
                return number
            case ast.UnaryOp(kind, operand) if type(kind) in OPERATORS:
                return OPERATORS[type(kind)](value(operand))
            case ast.BinOp(left, kind, right) if type(kind) in OPERATORS:
                return OPERATORS[type(kind)](value(left), value(right))
            case ast.Call(ast.Name("sqrt"), [operand], []):
                return math.sqrt(value(operand))
        raise ValueError(f"it knows numbers, + - * / % ( ) and sqrt, not {ast.unparse(node):.100}")

    if len(expression) > 1000:
        raise ValueError("an expression has at most 1,000 characters")
    return f"{value(ast.parse(expression.strip(), mode='eval')):.12g}"


def search(query: str) -> str:
    """Search a collection of texts.

    Args:
        query: Words to look for.
    """
    folder, words = Path(os.environ.get("TEXTS", "docs")), set(re.findall(r"\w+", query.lower()))
    passages = [text.strip() for file in sorted(folder.glob("*.[mt][dx]*")) for text in file.read_text().split("\n\n")]
    found = {text: len(words & set(re.findall(r"\w+", text.lower()))) for text in passages}
    best = max(found, key=lambda text: found[text], default="")
    return best if found.get(best) else "(nothing found)"
