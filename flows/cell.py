"""One part of a fanned-out night, as a worker runs it: one cell measured, or the caches of a model and prompt set timed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from prefect import flow
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.context import FlowRunContext
from prefect.states import Completed, Failed
from pydantic import Field

from tasks.config import Config, NightlyConfig
from tasks.paths import RESULTS
from tasks.prompts.prompt_sets import load_prompt_set
from tasks.run.cells import CellError, loaded_model, run_cell, run_throughput, throughput_key
from tasks.run.fan_out import WORKER
from tasks.run.plan import Cell, Circumstances, circumstances, identify, plan
from tasks.run.result_files import ResultStore
from tasks.run.result_transfer import between_machines, fetch, send
from tasks.sanitize import guard_logs
from tasks.tracking.store import writer

What = Literal["measure", "time"]


class Part(Config):
    """What a worker does of a night: cells of one model and prompt set, as the night's plan has them."""

    what: What = Field(description="measure one cell, or time the caches of several, interleaved")
    config: NightlyConfig = Field(description="the night's matrix, cut down to these cells, backends chosen")
    keys: tuple[str, ...] = Field(min_length=1, description="keys of the cells, which this machine must come to as well")
    night: str = Field(description="what the night is called")
    planned: Circumstances = Field(description="what the keys hold of the machine that planned the night")
    run_id: str = Field("", description="the night's run on the team's MLflow server")
    refresh: bool = Field(False, description="measure anew")


@flow(name="cell", flow_run_name="{label}", persist_result=False)
def cell(label: str, part: Part, tracking_dir: Path = Path("mlruns")) -> State[None]:
    """Do one part of a night; the night's own run starts these, and logs what comes of them.

    Args:
        label: What a person reads.
        part: What to do.
        tracking_dir: Folder of finished results.
    """
    guard_logs()
    _label_with_worker()
    try:
        do(label, part, tracking_dir)
    except CellError as error:
        return Failed(message=str(error))
    return Completed(message=f"{label}: {'timed' if part.what == 'time' else 'measured'}")


def do(label: str, part: Part, tracking_dir: Path) -> None:
    """Measure or time, then send the results.

    Raises:
        CellError: a measurement failed, or this machine is not of the kind that the night was planned for.
    """
    config = part.config
    prompts = load_prompt_set(config.prompt_sets[0])
    model = identify(config.models[0], loaded_model(config.models[0]))
    cells = plan(config, [prompts], [model], night=part.night).cells
    require_same(label, cells, part)
    store = ResultStore(tracking_dir / RESULTS)
    if part.what == "measure":
        run_cell(cells[0], prompts, store, reference_gb=config.reference_gb, refresh=part.refresh)
        send(tracking_dir, part.run_id, store, [cells[0].key])
        return
    if between_machines():
        with writer(tracking_dir) as tracking:
            fetch(tracking, part.run_id, store, [cell.key for cell in cells])
    run_throughput(label, cells, prompts, store, refresh=part.refresh)
    send(tracking_dir, part.run_id, store, [throughput_key(cells)])


def require_same(label: str, cells: tuple[Cell, ...], part: Part) -> None:
    """Raise unless this machine comes to the same keys: results of another kind of machine, or of other code, differ.

    Raises:
        CellError: they differ; the sentence says in what.
    """
    if {cell.key for cell in cells} == set(part.keys):
        return
    here, there = circumstances(), part.planned
    differing = [
        f"{name} {getattr(here, name)} instead of {getattr(there, name)}"
        for name in Circumstances.model_fields
        if getattr(here, name) != getattr(there, name)
    ]
    what = "; ".join(differing) or "its copy of the model or of the prompts"
    raise CellError(f"{label}: this worker would measure something else than the night planned: {what}")


def _label_with_worker() -> None:
    context, worker = FlowRunContext.get(), os.environ.get("PREFECT__WORKER_NAME")
    if worker and context is not None and context.flow_run is not None:
        with get_client(sync_client=True) as client:
            client.update_flow_run_labels(context.flow_run.id, {WORKER: worker})
