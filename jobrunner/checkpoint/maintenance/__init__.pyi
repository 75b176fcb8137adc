from .copy import (
    copy_epoch as copy_epoch,
    copy_files as copy_files,
    copy_root as copy_root,
    find_copied as find_copied,
    restore_epoch as restore_epoch,
)
from .inspect import (
    inspect_directory as inspect_directory,
)
from .repair import (
    repair_log as repair_log,
)
from .repair_plan import (
    Repair as Repair,
    plan_repair as plan_repair,
)
