"""What happened, when and to whom: phases, metrics, a trace and a picture. Knows no torch."""

from weightsync.observe.events import LONG_RUN_BYTES, Recorder, now_s, paused_s, pauses, phases_s
from weightsync.observe.metrics import Metrics
from weightsync.observe.picture import write_timeline_png
from weightsync.observe.timeline import chrome_trace, write_chrome_trace

__all__ = [
    "LONG_RUN_BYTES",
    "Metrics",
    "Recorder",
    "chrome_trace",
    "now_s",
    "paused_s",
    "pauses",
    "phases_s",
    "write_chrome_trace",
    "write_timeline_png",
]
