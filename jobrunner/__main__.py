"""``python -m jobrunner``: the command line."""

from jobrunner.cli import main

if __name__ == "__main__":
    main(prog_name="jobrunner")
