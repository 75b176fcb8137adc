from .object_files import (
    ObjectFiles as ObjectFiles,
)
from .parallel import (
    REMOVALS as REMOVALS,
    THREADS as THREADS,
    Jobs as Jobs,
    run_all as run_all,
    run_gently as run_gently,
)
from .locations import (
    FILES as FILES,
    absolute_path as absolute_path,
    files_beside as files_beside,
    files_of as files_of,
    is_url as is_url,
)
from .posix import (
    PosixFiles as PosixFiles,
    join_path as join_path,
    others_may_write as others_may_write,
)
from .protocol import (
    DOCUMENT_BYTES as DOCUMENT_BYTES,
    Buffers as Buffers,
    Files as Files,
)
from .remedies import (
    write_remedy as write_remedy,
)
