"""Tasks that read records, process them in threads and pass the results on."""

from jobrunner.pipes.pipe import pipe
