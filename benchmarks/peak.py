"""Peak memory of a call, in a process of its own: the peak of a process that did other things before says nothing."""

import subprocess
import sys

# The kernel's peak of this address space alone (getrusage's is handed down from the parent), since the last reset.
SCRIPT = """
import sys
sys.path[:0] = {path}
{setup}
def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
open("/proc/self/clear_refs", "w").write("5")
before = kib("VmRSS")
{call}
print((kib("VmHWM") - before) / 1024)
"""


def peak_mib(setup: str, call: str) -> float:
    """MiB that the statements of ``call`` take at their highest above what is held after those of ``setup``; Linux."""
    script = SCRIPT.format(path=sys.path[:2], setup=setup, call=call)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the measured process ended with {done.returncode}:\n{done.stderr}")
    return float(done.stdout)
