"""Benchmarks score responses as lm-evaluation-harness does, row for row.

    pip install lm-eval==0.4.13
    python -m tests.usp.rlhf.environments.test_benchmarks

records what the harness says in scores.json: of its task gsm8k, without examples, on a file of the published format,
with a model that writes `RESPONSES`, by its flexible filter.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from usp.rlhf.environments.benchmarks import BENCHMARKS

RECORDED = Path(__file__).with_name("scores.json")
GOLD = ["42", "1,000", "7", "-3", "18.5", "5"]
RESPONSES = [
    *(
        "#### 42",
        " The answer is 42.",
        " \\boxed{42}",
        " 1,000 apples",
        " $42",
        " $1,000.",
        " So it is $ 42",
        " ####42",
    ),
    *(" #### 1,000", " #### $42", " #### 42.\n", " none", "", " 6 * 7 = 42\n#### 42\nQuestion: and 7? #### 7", " -3"),
    *(" #### 7 or #### 42", " minus -3.", " = -3.0", " 12 - 5 = 7", " 12-5=7", " 1,2,3 and 4,", " answer: 7...", ""),
    *(
        " ... ",
        " , ",
        " 1000",
        " $1,000.00",
        " 1,000.",
        " 18.5",
        " 18.50",
        " #### 18.5.",
        " 5\u00b2 = 25",
        " three",
        " 5%",
    ),
    *(" 5 5 5", " **5**", " 5\n\nQuestion: 7", " Question: 42", " \u0664\u0662", "####  42", " #### -3", " #### 42 42"),
    *("The answer is 42!?", "42</s> 43", "x = 42; y = 7. Then 42", "1,000,", "#### .5", "#### 5,", "#### 5.."),
]


def gsm8k() -> list[tuple[dict[str, str], str]]:
    """Return rows in GSM8K's format with responses to them."""
    pairs = [(text, gold) for text in RESPONSES for gold in GOLD]
    texts = {"question": "Row {}: how many?", "answer": "So 1 #### of them.\n#### {}"}
    rows = [(texts["question"].format(n), texts["answer"].format(gold)) for n, (_, gold) in enumerate(pairs)]
    return [({"question": row[0], "answer": row[1]}, text) for row, (text, _) in zip(rows, pairs, strict=True)]


def scores(name: str, samples: list[tuple[dict[str, Any], str]]) -> list[float]:
    """Return what a benchmark says of responses to rows."""
    found = []
    for row, text in samples:
        prompt, answer = BENCHMARKS[name].asked(row)
        found.append(BENCHMARKS[name].score({"prompt": prompt, "answer": answer, "row": row}, text))
    return found


def test_scores_are_those_of_the_harness() -> None:
    recorded = json.loads(RECORDED.read_text())
    assert [int(score) for score in scores("gsm8k", gsm8k())] == recorded
    assert 0 < sum(recorded) < len(recorded) and len(recorded) > 30


HUMANEVAL = {"prompt": 'from math import sqrt\n\ndef root(x):\n    """Root."""\n', "entry_point": "root"}
HUMANEVAL |= {"test": "def check(candidate):\n    assert candidate(4) == 2\n", "task_id": "HumanEval/0"}
MBPP = {"text": "Write root.", "code": "", "test_list": ["assert root(4) == 2", "assert root(9) == 3"]}
MBPP |= {"test_setup_code": "", "challenge_test_list": []}
ROWS = {  # benchmark, row: prompt, answer
    "gsm8k": ({"question": "2+2?", "answer": "2+2\n#### 4"}, "Question: 2+2?\nAnswer:", "2+2\n#### 4"),
    "math500": ({"problem": "2{x}?", "answer": "\\frac{1}{2}", "level": 1}, "2{x}?\nReason", "\\frac{1}{2}"),
    "aime": ({"ID": "2024-I-1", "Problem": "How many?", "Answer": 33, "Solution": ""}, "How many?\nReason", "33"),
    "aime of 2025": ({"question": "How many?", "answer": "033"}, "How many?\nReason", "033"),
    "needle": ({"input": "In. ", "answer_prefix": "It is", "outputs": ["12", "34"]}, "In. It is", "12\n34"),
    "humaneval": (HUMANEVAL, HUMANEVAL["prompt"], f"{HUMANEVAL['test']}\ncheck(root)"),
    "mbpp": (
        MBPP,
        "You are an expert Python programmer, and here is your task: Write root.",
        "\nassert root(4) == 2\nas",
    ),
    "mbpp sanitized": (
        {"prompt": "Write root.", "test_imports": ["import math"], "test_list": ["assert root(4) == 2"]},
        "You are an expert Python programmer, and here is your task: Write root.",
        "import math\nassert root(4) == 2",
    ),
}


@pytest.mark.parametrize("case", ROWS)
def test_published_rows_become_prompts_with_answers(case: str) -> None:
    row, prompt, answer = ROWS[case]
    found = BENCHMARKS[case.partition(" ")[0]].asked(row)
    assert found[0].startswith(prompt) and found[1].startswith(answer)
    with pytest.raises(ValueError, match="no text under"):
        BENCHMARKS[case.partition(" ")[0]].asked({"text": ""})


def test_needles_count_in_any_case_of_letters() -> None:
    row = {"input": "?", "outputs": ["Oslo", "34"]}
    assert scores("needle", [(row, "OSLO and 34"), (row, "oslo"), (row, "")]) == [1, 0.5, 0]


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("name", "response", "passes"),
    [
        ("humaneval", "    return sqrt(x)\n\ndef other():\n    assert False\nother()", 1.0),
        ("humaneval", "So:\n```python\ndef root(x):\n    return sqrt(x)\n```\n", 1.0),
        ("humaneval", "    return x\n", 0.0),
        ("mbpp", "def root(x):\n    return x**0.5\n[DONE]\nassert False", 1.0),
        ("mbpp", "def root(x):\n    return 2\n[DONE]", 0.0),
    ],
)
def test_code_runs_in_the_sandbox(name: str, response: str, passes: float) -> None:
    row = HUMANEVAL if name == "humaneval" else MBPP
    prompt, answer = BENCHMARKS[name].asked(row)
    assert BENCHMARKS[name].score({"prompt": prompt, "answer": answer, "row": row}, response) == passes


def record() -> None:
    """Write what lm-evaluation-harness says."""
    import lm_eval
    from lm_eval.api.model import LM

    class Planted(LM):
        def generate_until(self, requests: Any) -> list[str]:
            texts = []
            for (prompt, how), (row, text) in zip([each.args for each in requests], gsm8k(), strict=True):
                assert prompt == BENCHMARKS["gsm8k"].asked(row)[0]
                texts.append(min((text.partition(end)[0] for end in how["until"]), key=len))
            return texts

        def loglikelihood(self, requests: Any) -> Any: ...

        def loglikelihood_rolling(self, requests: Any) -> Any: ...

    with tempfile.TemporaryDirectory() as folder:
        data, task = Path(folder, "gsm8k.jsonl"), Path(folder, "gsm8k_local.yaml")
        data.write_text("".join(json.dumps(row) + "\n" for row, _ in gsm8k()))
        published = Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml"
        changes = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": {"test": str(data)}}}
        changes |= {"training_split": None, "fewshot_split": None, "num_fewshot": 0, "task": "gsm8k_local"}
        task.write_text(json.dumps({"include": str(published), **changes}))
        tasks = lm_eval.tasks.TaskManager(include_path=folder)
        done = lm_eval.simple_evaluate(Planted(), tasks=["gsm8k_local"], task_manager=tasks, bootstrap_iters=0)
    samples = [each for each in done["samples"]["gsm8k_local"] if each["filter"] == "flexible-extract"]
    found = [int(each["exact_match"]) for each in sorted(samples, key=lambda each: each["doc_id"])]
    RECORDED.write_text(json.dumps(found) + "\n")


if __name__ == "__main__":
    record()
