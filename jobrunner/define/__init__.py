"""What users write: nodes, blobs, tasks, groups and jobs. No I/O, no Dask."""

from jobrunner.define.arguments import (
    COUNT,
    EPOCH,
    EPOCHS,
    FLAG,
    INTERVAL,
    LABEL,
    NAMES,
    NAMES_BY_NAME,
    NATURAL,
    PATH,
    SECONDS,
    TEXT,
    Rule,
    check_call,
    check_runs,
    check_seedable,
    checked,
    constants_of,
    instance,
    number,
    one_of,
    or_none,
    read_setup,
    some,
    without_partials,
)
from jobrunner.define.array_options import (
    DEFAULT_ARRAY_OPTIONS,
    ArrayOptions,
    Compressor,
    read_compressors,
)
from jobrunner.define.drawing import to_image
from jobrunner.define.global_generators import GlobalRNG, seeded_generators
from jobrunner.define.group import TaskGroup
from jobrunner.define.job_functions import (
    HIDDEN,
    is_job_function,
    job,
    read_parameters,
    without_secrets,
)
from jobrunner.define.jobs import Job, epoch_limiter
from jobrunner.define.metrics import (
    MOST_ARRAYS_BYTES,
    MOST_DIGITS,
    ArrayEntry,
    Image,
    Max,
    Mean,
    Metric,
    MetricEntry,
    Min,
    Reported,
    Sum,
    Total,
    Totals,
    merge_reports,
    pack_array,
)
from jobrunner.define.node import Blob, Node, WorkspaceType, as_node
from jobrunner.define.orphans import check_orphans, forget_orphan
from jobrunner.define.task import Task, TaskOutput
