"""The API keys of an ingress: those of a file, which may change while it runs."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from app.api.auth.keys import Authenticator, KeyRing, without_keys
from app.api.auth.limits import SharedPools
from app.config import ApiConfig, KeyConfig
from app.errors import Failure, InvalidSetup, described
from deployments.serve.settings import read_keys

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
MAX_SILENCE_S = 60.0  # without a look: what was revoked would stay valid


class Keys:
    """The valid API keys. A change of the file holds within `LOOK_EVERY_S`; a file with mistakes changes nothing."""

    def __init__(self, config: ApiConfig, pools: SharedPools | None = None) -> None:
        """`pools` are shared by the accounts of all keys. Raises InvalidSetup when the file has mistakes."""
        self._path = Path(config.keys_file).expanduser() if config.keys_file else None
        self._looked_at: float | None = None
        self._reported = ""
        self._state = self._look()
        # A file without keys is a mistake, so that no mistake can end authentication.
        self._ring = None if self._path is None else KeyRing(read_keys(self._path), pools=pools)
        self.authenticator: Authenticator = self._ring or without_keys(config, pools)

    async def follow(self) -> NoReturn:
        """Look again and again, whatever is wrong with the file."""
        self._looked_at = time.monotonic()
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            try:
                # The accounts are the event loop's: a thread only reads.
                self._take(await asyncio.to_thread(self.changed))
            except Exception as error:
                self._report(described(error))
            else:
                self._looked_at = time.monotonic()

    def check_health(self) -> None:
        """Raises Failure when the file has not been looked at for too long, for example as its disk does not answer."""
        if self._looked_at is None:
            return
        silence_s = time.monotonic() - self._looked_at
        if silence_s > MAX_SILENCE_S:
            raise Failure(f"the file of API keys has not been read for {silence_s:.0f} s; a revoked key may be valid")

    def refresh(self) -> None:
        """Take the keys of the file if it has changed since the last look."""
        self._take(self.changed())

    def changed(self) -> tuple[tuple[int, ...], Sequence[KeyConfig]] | None:
        """The state and the keys of a file that has changed; None: they stay as they are."""
        state = self._look()
        if self._path is None or state == self._state:
            return None
        try:
            return state, read_keys(self._path)
        except InvalidSetup as error:
            self._report(str(error))
            return None

    def _take(self, changed: tuple[tuple[int, ...], Sequence[KeyConfig]] | None) -> None:
        if changed is None or self._ring is None:
            return
        self._state, keys = changed
        self._reported = ""
        self._ring.replace(keys)
        logger.info("there are %d API keys now: %s", len(keys), ", ".join(key.name for key in keys))

    def _report(self, mistake: str) -> None:
        if mistake != self._reported:
            logger.error("the API keys stay as they were: %s", mistake)
        self._reported = mistake

    def _look(self) -> tuple[int, ...]:
        """What changes when the file does."""
        if self._path is None:
            return ()
        try:
            stat = self._path.stat()
        except OSError:
            return (0,)
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
