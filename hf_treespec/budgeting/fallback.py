"""Never slower: plain decoding where speculation loses, by what rounds are seen to take."""

import logging
import time
from collections import deque
from statistics import median


logger = logging.getLogger(__name__)

# How rounds are timed; seconds that are 0 are not looked at.
clock = time.perf_counter

# What speculation may lose before it stops, in plain rounds: at first, and when it is tried again.
_PATIENCE, _RETRY_PATIENCE = 6.0, 3.0
# Rounds after which a retry has the first patience again.
_SETTLED = 32
# Plain rounds before speculation is tried again; twice as many each time it loses again.
_FIRST_WAIT, _LONGEST_WAIT = 192, 8192
# Speculative rounds before the first probe and between probes at least, and what probes may cost, as a share of the time.
_FIRST_PROBE, _BETWEEN_PROBES, _PROBE_SHARE = 4, 16, 0.005
# Plain rounds whose median is the estimate; what a round of speculation still counts after the next one.
_KEPT, _MEMORY = 5, 0.95


class Fallback:
    """Says round by round whether to speculate, from the time that rounds take.

    Emitted tokens per second of speculation, a running estimate, are compared with those of plain rounds, which are
    probed now and then: rarely enough that the probes cost no more than half a percent. What speculation loses against
    plain decoding is added up, what it gains taken off, never below 0; where that reaches a few plain rounds while the
    running estimate loses too, rows decode plainly, and speculation is tried again after a wait that doubles.
    """

    def __init__(self) -> None:
        # Seconds of the last plain rounds, by the octave of the number of rows.
        self._plain: dict[int, deque[float]] = {}
        self._speculating, self._patience = True, _PATIENCE
        self._lost = self._tokens = self._seconds = self._weight = 0.0
        self._since_probe, self._rounds_since_probe, self._rounds = 0.0, 0, 0
        self._wait, self._waited = _FIRST_WAIT, 0

    def speculates(self, batch: int) -> bool:
        """Whether the next round, of `batch` rows, is to speculate."""
        return self._speculating and not self._probe_is_due(batch)

    def _probe_is_due(self, batch: int) -> bool:
        plain = self._plain_seconds(batch)
        if plain is None:
            # The more tokens a round emits, the less likely it is that speculation loses.
            per_row = self._tokens / (batch * self._weight) if self._weight else 1.0
            return self._rounds_since_probe >= _FIRST_PROBE * per_row
        # What the probe's tokens would have gained.
        loss = max(0.0, plain - batch * self._seconds / self._tokens) if self._tokens else 0.0
        return self._rounds_since_probe >= _BETWEEN_PROBES and self._since_probe * _PROBE_SHARE >= loss

    def _plain_seconds(self, batch: int) -> float | None:
        seconds = self._plain.get(batch.bit_length())
        return None if not seconds else median(seconds)

    def observe(self, batch: int, tokens: int, seconds: float, plain: bool) -> None:
        """Takes in a round: rows, tokens emitted over all of them, seconds, and whether it decoded plainly."""
        if not seconds > 0:
            return
        if plain:
            self._plain.setdefault(batch.bit_length(), deque(maxlen=_KEPT)).append(seconds)
            self._since_probe, self._rounds_since_probe = 0.0, 0
            if not self._speculating:
                self._count_wait()
            return
        self._tokens, self._seconds = _MEMORY * self._tokens + tokens, _MEMORY * self._seconds + seconds
        self._weight = _MEMORY * self._weight + 1
        self._since_probe += seconds
        self._rounds_since_probe += 1
        self._rounds += 1
        if self._rounds == _SETTLED:
            self._patience, self._wait = _PATIENCE, _FIRST_WAIT
        usual = self._plain_seconds(batch)
        if usual is None:
            return
        self._lost = max(0.0, self._lost + seconds / usual - tokens / batch)
        if self._lost > self._patience and self._tokens * usual < self._seconds * batch:
            self._switch(False, usual, batch)

    def _count_wait(self) -> None:
        self._waited += 1
        if self._waited >= self._wait:
            self._wait = min(2 * self._wait, _LONGEST_WAIT)
            self._patience = _RETRY_PATIENCE
            self._switch(True)

    def _switch(self, speculating: bool, usual: float = 0.0, batch: int = 1) -> None:
        if speculating:
            logger.info(f"Speculation is tried again after {self._waited} plain rounds.")
        else:
            ratio = self._tokens * usual / (self._seconds * batch)
            logger.info(
                f"Speculation emits {ratio:.2f} of plain decoding's tokens per second here: plain decoding for the next "
                f"{self._wait} rounds."
            )
        self._speculating = speculating
        self._lost = self._tokens = self._seconds = self._weight = 0.0
        self._rounds = self._waited = 0
