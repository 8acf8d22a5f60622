r"""A tool: the model may ask a calculator before it answers.

    samplestore worker --db rollouts.db --router URL --tokenizer MODEL \
        --episode samplestore.examples.calculator:episode

The prompt is a list of messages, the label the right number. The model writes `calc: 12 - 7`, gets the result as a
message of the tool, and ends with `answer: 5`.
"""

from __future__ import annotations

import ast
import operator
import re
from typing import Any

from samplestore.errors import EpisodeTruncated, StepFailed

MAX_TURNS, TURN_TOKENS = 4, 48
ASKED = re.compile(r"calc: *([^\n]{1,100})")
ANSWERED = re.compile(r"answer: *(-?\d+(?:\.\d+)?)")
OPERATORS: dict[type, Any] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.USub: operator.neg,
}  # fmt: skip


async def episode(ctx: Any) -> float:
    """1.0 if the answer is the label, else 0.0, also where it ran out of room before it answered."""
    try:
        return await solve(ctx)
    except EpisodeTruncated:
        return 0.0


async def solve(ctx: Any) -> float:
    for _ in range(MAX_TURNS):
        turn = await ctx.generate(max_new_tokens=TURN_TOKENS)
        if found := ANSWERED.search(turn.text):
            return float(float(found[1]) == float(ctx.label))
        if asked := ASKED.search(turn.text):
            try:
                said = str(await ctx.step(calculate, asked[1]))
            except StepFailed as error:
                said = f"error: {error.error}"
        else:
            said = "write calc: and what to compute, or answer: and a number"
        await ctx.say([{"role": "tool", "content": said[:200]}])
    return 0.0


def calculate(expression: str) -> float:
    """The value of a sum, difference, product or quotient of numbers. What a model writes is never run as code."""
    return _value(ast.parse(expression.strip(), mode="eval").body)


def _value(node: ast.AST) -> float:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            return value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return float(OPERATORS[type(op)](_value(left), _value(right)))
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
    raise ValueError(f"{type(node).__name__} is not arithmetic")
