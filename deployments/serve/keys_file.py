"""The API keys of an ingress: those of its settings and those of a file, which may change while it runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import NoReturn

from app.api.auth.keys import Authenticator, KeyRing, authenticator_of
from app.config import ApiConfig
from app.errors import InvalidSetup
from deployments.serve.settings import all_keys

logger = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0


class Keys:
    """The valid API keys. A change of the file holds within `LOOK_EVERY_S`; a file with mistakes changes nothing."""

    def __init__(self, config: ApiConfig) -> None:
        """Raises InvalidSetup when the file has mistakes."""
        self._config = config
        self._state = self._look()
        keys = all_keys(config)
        self._ring = KeyRing(keys)
        # A file without keys is a mistake, so that no mistake can end authentication.
        self.authenticator: Authenticator = self._ring if keys else authenticator_of(config)

    async def follow(self) -> NoReturn:
        """Look again and again."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            await asyncio.to_thread(self.refresh)

    def refresh(self) -> None:
        """Take the keys of the file if it has changed since the last look."""
        state = self._look()
        if state == self._state:
            return
        self._state = state
        try:
            keys = all_keys(self._config)
        except InvalidSetup as error:
            logger.error("the API keys stay as they were: %s", error)
            return
        self._ring.replace(keys)
        logger.info("there are %d API keys now: %s", len(keys), ", ".join(key.name for key in keys))

    def _look(self) -> tuple[int, ...]:
        """What changes when the file does."""
        if not self._config.keys_file:
            return ()
        try:
            stat = Path(self._config.keys_file).expanduser().stat()
        except OSError:
            return (0,)
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
