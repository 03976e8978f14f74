"""A made-up peer behind the real loop: what it does depends on the first prompt's length (11 to 15).

Run as a script; the orders' `start` names what it does when it starts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from agentserve.bench.compare.drivers.loop import serve


class MadeUp:
    version = "0.1"

    def __init__(self, orders) -> None:
        self.settings = {"given": orders["given"]}
        match orders.get("start"):
            case "refuse":
                raise ValueError("no such\nmodel")
            case "exit":
                os._exit(3)
            case "sleep":
                time.sleep(3600)
            case "family":
                # One that ignores SIGTERM, in a session of its own, whose parent is gone.
                sleep = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(3600)"
                orphan = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {sleep!r}],"
                orphan += (
                    " start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).pid)"
                )
                made = subprocess.run(
                    [sys.executable, "-c", orphan], capture_output=True, text=True, check=True
                )
                self.settings["orphan"] = int(made.stdout)
                self.settings["pid"] = os.getpid()
        print("hello from a library", flush=True)  # to the log, not among the answers

    def prefill(self, prompts):
        return 0.5 * len(prompts[0]) / 100

    def decode(self, prompts, steps):
        match len(prompts[0]):
            case 11:
                os.kill(os.getpid(), signal.SIGKILL)
            case 12:
                # As a library would that writes past everything; the loop's answers are descriptor 3 or up.
                for descriptor in range(3, 20):
                    try:
                        if os.readlink(f"/proc/self/fd/{descriptor}").startswith("pipe:"):
                            os.write(descriptor, b"warming up...\n")
                    except OSError:
                        continue
            case 13:
                time.sleep(3600)
            case 14:
                raise MemoryError("too\nmuch")
            case 15:
                return [0.1]
        return [9.0, 9.0] + [0.25] * (steps - 2)


if __name__ == "__main__":
    sys.exit(serve(MadeUp))
