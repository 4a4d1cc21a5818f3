"""What a user sees while a model is compiled: phases on a terminal, one line in the log."""

from __future__ import annotations

import logging
import sys
import time

_LOG = logging.getLogger(__name__)


class Progress:
    """Phases of one compilation and their times. A terminal shows the phase that runs, on one line
    of standard error that is wiped at the end; where there is no terminal, or `quiet`, nothing."""

    def __init__(self, *, quiet: bool) -> None:
        self._shown = not quiet and sys.stderr.isatty()
        self._start_s = self._phase_start_s = time.monotonic()
        self._phase = ""
        self._phases: list[tuple[str, float]] = []

    def phase(self, name: str) -> None:
        """The last phase is over, and `name` begins."""
        now_s = time.monotonic()
        if self._phase:
            self._phases.append((self._phase, now_s - self._phase_start_s))
        self._phase, self._phase_start_s = name, now_s
        self(name)

    def __call__(self, text: str) -> None:
        """Show `text` as what happens within the phase."""
        _LOG.debug("%s", text)
        if self._shown:
            elapsed_s = time.monotonic() - self._start_s
            sys.stderr.write(f"\r\x1b[2Kautopar: {text} ({elapsed_s:.1f} s)")
            sys.stderr.flush()

    def close(self) -> None:
        """Wipe the line."""
        if self._shown:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()

    def times(self) -> str:
        """`4.1 s: trace 1.2, plan 2.5, rewrite 0.4`, of the phases that are over."""
        parts = ", ".join(f"{name} {seconds:.1f}" for name, seconds in self._phases)
        return f"{time.monotonic() - self._start_s:.1f} s: {parts}"
