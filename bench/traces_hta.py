"""What Holistic Trace Analysis needs for a trace: loading it and three of its analyses.

    python bench/traces_hta.py TRACE

Prints one line of JSON. Times are kept to the nanosecond, as strobe keeps them: HTA's default rounds every event inward
to whole microseconds.
"""
import json
import os
import sys
import time

os.environ["HTA_DISABLE_NS_ROUNDING"] = "1"
from hta.trace_analysis import TraceAnalysis  # noqa: E402  (reads the variable when it is imported)

seconds = {}


def timed(name, run):
    begun = time.perf_counter()
    result = run()
    seconds[name] = round(time.perf_counter() - begun, 3)
    return result


analysis = timed("load", lambda: TraceAnalysis(trace_files={0: sys.argv[1]}))
busy = timed("temporal_breakdown", lambda: analysis.get_temporal_breakdown(visualize=False))
timed("kernel_breakdown", lambda: analysis.get_gpu_kernel_breakdown(visualize=False))
timed("idle_breakdown", lambda: analysis.get_idle_time_breakdown(visualize=False))
row = busy.iloc[0]
print(json.dumps({"seconds": seconds, "busy_us": float(row["compute_time(us)"] + row["non_compute_time(us)"])}))
