"""What a cache does to tasks with right answers: the log-probability it takes from them, and the answers that it loses.

    python tests/bench/task_damage.py --out tests/bench/results/task_damage_x86.json

Every task of ``flows/configs/tasks.yaml``, on the embedded model. Rows have ``task``, ``spec``, ``accuracy``,
``accuracy_full``, ``logprob_difference`` with its interval over questions, and ``logprob_worst``. Both caches are asked the
same questions.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from timing import parser, report

from kivi.measure.answers.questions import measure_answers
from kivi.measure.monitor import Monitor
from kivi.measure.reference import ReferenceStore
from kivi.models import load_model
from kivi.spec import CacheSpec
from tasks.config import load_config
from tasks.prompts.prompt_sets import load_prompt_set

CONFIG = Path(__file__).parents[2] / "flows" / "configs" / "tasks.yaml"


def main() -> None:
    options_of = parser(__doc__)
    options_of.add_argument("--questions", type=int, default=10)
    options_of.add_argument("--length", type=int, default=1024)
    options_of.add_argument("--tokens", type=int, default=16, help="most tokens of a greedy answer")
    options_of.add_argument("--tasks", nargs="+")
    options_of.add_argument("--specs", nargs="+")
    options = options_of.parse_args()
    config, model = load_config(CONFIG), load_model()
    specs = [CacheSpec.parse(text) for text in options.specs] if options.specs else config.specs[1:]  # full changes nothing
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        references = ReferenceStore(Path(folder), 10**9)
        for prompts in config.prompt_sets:
            if options.tasks and prompts.name not in options.tasks:
                continue
            chosen = prompts.model_copy(update={"length": options.length, "limit": options.questions})
            settings = prompts.answers.model_copy(update={"questions": options.questions, "tokens": options.tokens})
            questions = load_prompt_set(chosen).questions()
            for spec in specs:
                asked = measure_answers(model, questions, spec, settings, references=references, monitor=Monitor(), seed=0)
                rows.append(
                    {
                        "task": prompts.name,
                        "spec": spec.slug,
                        **asked.model_dump(
                            include={"accuracy", "accuracy_full", "questions", "logprob_difference", "logprob_worst"}
                        ),
                        "logprob_interval": asked.logprob_interval
                        and asked.logprob_interval.model_dump(include={"low", "high"}),
                    }
                )
                report("task_damage", options, {"model": model.name, "dtype": model.dtype, "rows": rows})


if __name__ == "__main__":
    main()
