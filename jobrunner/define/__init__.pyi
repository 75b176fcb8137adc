from .array_options import (
    DEFAULT_ARRAY_OPTIONS as DEFAULT_ARRAY_OPTIONS,
    ArrayOptions as ArrayOptions,
    read_compressors as read_compressors,
)
from .checks import (
    COUNT as COUNT,
    EPOCH as EPOCH,
    MOST_DIGITS as MOST_DIGITS,
    PATH as PATH,
    Count as Count,
    Interval as Interval,
    Label as Label,
    Natural as Natural,
    Rule as Rule,
    Seconds as Seconds,
    check_call as check_call,
    checked as checked,
    constants_of as constants_of,
    instance as instance,
    number as number,
    without_partials as without_partials,
)
from .job_functions import (
    is_job_function as is_job_function,
    job as job,
    read_parameters as read_parameters,
    without_secrets as without_secrets,
)
from .jobs import (
    Job as Job,
    epoch_limiter as epoch_limiter,
)
from .dask_arguments import (
    Arrives as Arrives,
    LazyArgument as LazyArgument,
    is_lazy as is_lazy,
    is_of_dask as is_of_dask,
    name_lazy as name_lazy,
    replaced as replaced,
)
from .metrics import (
    Max as Max,
    Mean as Mean,
    Metric as Metric,
    MetricEntry as MetricEntry,
    Min as Min,
    Sum as Sum,
    Total as Total,
    merge_reports as merge_reports,
)
from .node import (
    Blob as Blob,
    Node as Node,
    WorkspaceType as WorkspaceType,
    as_node as as_node,
)
from .parameters import (
    HIDDEN as HIDDEN,
    ParameterPlace as ParameterPlace,
)
from .seeding import (
    check_seedable as check_seedable,
    seeded_generators as seeded_generators,
)
from .task import (
    Task as Task,
    TaskGroup as TaskGroup,
    TaskOutput as TaskOutput,
)
