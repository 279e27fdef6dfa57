"""Answer every row of some files: `python -m deployments.bulk --input FILE_OR_GLOB --output DIR`.

A run starts its own engines. In a Ray job (`ray job submit --working-dir . -- python -m deployments.bulk ...`), they
run on the job's cluster, and otherwise on a new local cluster. Mistakes in the arguments are reported before Ray is
imported. A run can be resumed with --resume, even if it was killed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import closing

from app.errors import CarouselError
from app.jobs.input_files import find_files, look_through
from app.jobs.run_folder import OUTPUTS, Summary, finished_summary, open_run
from deployments.bulk.options import Options, read_options
from deployments.cli import INTERRUPTED

ROWS_FAILED = 3  # the exit status if all rows failed or, with --fail-on-row-errors, if any row failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command. Returns the exit status: 0, ROWS_FAILED, 1 after an error, or INTERRUPTED after Ctrl-C."""
    try:
        options = read_options(arguments)
        summary = _run(options)
    except CarouselError as error:
        print(error.message, file=sys.stderr, flush=True)
        return 1
    except KeyboardInterrupt:
        print("Stopped. The results so far have been saved. Use --resume to continue.", file=sys.stderr, flush=True)
        return INTERRUPTED
    print(f"{summary}\nThe results are in {options.output / OUTPUTS[options.output_format]}", flush=True)
    return ROWS_FAILED if summary.failed and (options.fail_on_row_errors or not summary.ok) else 0


def _run(options: Options) -> Summary:
    """Run the job and return its summary. A finished run is not repeated. Raises InvalidSetup or Failure."""
    found = look_through(find_files(options.input), options.rows)
    run = options.description() | {"num_rows": found.num_rows, "fingerprint": found.fingerprint}
    finished = finished_summary(options.output, run) if options.resume else None
    if finished is not None:
        return finished
    folder = open_run(
        options.output, run=run, num_items=found.num_rows, output_format=options.output_format, resume=options.resume
    )
    with closing(folder):
        _set_environment(is_local_model=options.is_local_model)
        from deployments.bulk.pool_run import run_on_pool  # Ray reads the environment when it is imported

        return run_on_pool(found, folder, options.rows, options.served)


def _set_environment(*, is_local_model: bool) -> None:
    """Set environment variables for Ray and the model hub, except those that are already set."""
    defaults = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_AUTO_CONNECT": "0",  # otherwise a reader that outlives a failed job would start another cluster
    }
    if "RAY_ADDRESS" not in os.environ:  # for a local cluster, see deployments/launcher/supervisor.py
        defaults["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    if is_local_model:
        defaults["HF_HUB_OFFLINE"] = "1"
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


if __name__ == "__main__":
    sys.exit(main())
