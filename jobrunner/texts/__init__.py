"""Every text for people, made safe to show: in terminals, logs and errors, or as HTML and SVG."""

from jobrunner.texts.markup import Html, card, escape, folded, join, pairs, table, tag
from jobrunner.texts.plain import (
    SCRIPT_PREFIX,
    clip,
    counted,
    counted_names,
    format_bytes,
    format_metrics,
    format_seconds,
    format_time,
    format_value,
    get_logger,
    listed,
    metric_texts,
    printable,
    shorten,
    show,
    whole_metrics,
    without_credentials,
)
