"""What a user sees while a model is compiled: phases on a terminal, one line in the log."""

from __future__ import annotations

import logging
import shutil
import sys
import time

from autopar.report.progress import TimedLines, has_terminal, print_line, step_text

_LOG = logging.getLogger(__name__)


class StepProgress:
    """Phases of one compilation and their times, until `close`. On a terminal, one line of standard
    error shows the current phase; without one, a line every 10 seconds does. If `quiet`, nothing is
    shown or logged."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._shown = not quiet and has_terminal()
        self._lines = None if quiet or self._shown else TimedLines(print_line)
        self._start_s = self._phase_start_s = time.monotonic()
        self._phase = ""
        self._phases: list[tuple[str, float]] = []

    def phase(self, name: str) -> None:
        """End the last phase, and begin `name`."""
        self._end_phase()
        self._phase = name
        self(name)

    def __call__(self, text: str) -> None:
        """Show `text` within the phase."""
        if not self._quiet:
            _LOG.debug("%s", text)
        if self._lines is not None:
            self._lines(text)
        seconds = f" ({time.monotonic() - self._start_s:.1f} s)"
        # What goes on in a second row stays there: a line alone can be wiped.
        most = shutil.get_terminal_size().columns - len("autopar: " + seconds) - 1
        self._show(step_text(text)[: max(0, most)] + seconds)

    def close(self, result: str = "") -> None:
        """End: `result`, if any, is logged with the times, and stays on the terminal."""
        self._end_phase()
        if self._lines is not None:
            self._lines.close()
        if result:
            times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._phases)
            result = f"{result}; {times}"
            if not self._quiet:
                _LOG.info("%s", result)
        self._show(f"{result}\n" if result else "")

    def _end_phase(self) -> None:
        now_s = time.monotonic()
        if self._phase:
            self._phases.append((self._phase, now_s - self._phase_start_s))
        self._phase, self._phase_start_s = "", now_s

    def _show(self, text: str) -> None:
        if self._shown:
            sys.stderr.write(f"\r\x1b[2K{'autopar: ' if text else ''}{text}")
            sys.stderr.flush()
