"""Logging of a Paceline process: the router's, a node's or a command's. Lines go to stderr."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime

from paceline.option_values import LogFormat, LogLevel

PACKAGES = ("benchmarks", "cluster", "decode_node", "draft_training", "kv_transfer", "paceline", "prefill_node")
LIBRARIES = logging.INFO  # the least severe messages that other packages may log, whatever the level


def configure_logging(level: LogLevel, form: LogFormat, process: str) -> None:
    """Log messages from ``level`` up to stderr. The first call counts, and none where logging is set up already.

    process: the node's id, or ``router``.
    """
    root = logging.getLogger()
    if root.handlers:
        return
    handler = logging.StreamHandler()
    text = logging.Formatter(f"%(asctime)s {process} %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter(process) if form == "json" else text)
    root.addHandler(handler)
    number = logging.getLevelNamesMapping()[level.upper()]
    root.setLevel(max(number, LIBRARIES))
    for package in PACKAGES:
        logging.getLogger(package).setLevel(number)


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, node, message, and exception where there is one."""

    def __init__(self, process: str) -> None:
        super().__init__()
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        """See logging.Formatter."""
        line = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "node": self._process,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)
