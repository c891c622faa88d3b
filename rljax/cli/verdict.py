"""Which errors are a user's to mend: the paragraph printed for them, and the exit status."""

from __future__ import annotations

import difflib
import inspect
import re
import sys
import traceback
from pathlib import Path

from rljax.cli import configs

PACKAGE = Path(__file__).parents[1]


def of(error: Exception) -> tuple[str, int]:
    """The paragraph and exit status of an error that says what to do; status 0 of a bug."""
    files = [frame.filename for frame in _frames(error)]
    ours = Path(files[-1]).is_relative_to(PACKAGE)  # raised by a line of rljax, so on purpose
    text = str(error)
    match error:
        case FileNotFoundError() | IsADirectoryError() | NotADirectoryError():
            return text, 2
        case OSError():
            return text, 1
        case ValueError() if ours:
            return _config_line(error) + text, 2
        case ImportError() if ours and error.name is None:  # says what to install
            return _config_line(error) + text, 2
        case FloatingPointError() if ours:
            return text, 1
        case RuntimeError() if type(error).__name__ in ("CheckpointError", "RewardError"):
            return text, 1  # by name: importing the classes would load what the command does not
        case SyntaxError() if error.filename in configs.EXECUTED:
            return f"{error.filename}, line {error.lineno}: {error.msg}", 2
        case TypeError() if _config_line(error) and unknown_keyword(error):
            return _config_line(error) + unknown_keyword(error), 2
    if files[-1] in configs.EXECUTED:  # raised by a line of the config itself
        return f"{_config_line(error)}{type(error).__name__}: {text}", 2
    return "", 0


def _frames(error: Exception) -> list[traceback.FrameSummary]:
    return traceback.extract_tb(error.__traceback__)


def _config_line(error: Exception) -> str:
    """The line of a config file through which the error came, as "FILE, line N: ", or ""."""
    lines = [f for f in _frames(error) if f.filename in configs.EXECUTED]
    return f"{lines[-1].filename}, line {lines[-1].lineno}: " if lines else ""


def unknown_keyword(error: Exception) -> str:
    """Rewrites "got an unexpected keyword argument" with the names there are."""
    pattern = r"([\w.]+)\(\) got an unexpected keyword argument '(\w+)'"
    found = re.search(pattern, str(error)) if isinstance(error, TypeError) else None
    if not found:
        return ""
    owner, wrong = found[1].removesuffix(".__init__"), found[2]
    message = f"{owner} has no field {wrong!r}"
    for name, module in list(sys.modules.items()):
        target = getattr(module, owner, None) if name.startswith("rljax") else None
        if callable(target):
            names = list(inspect.signature(target).parameters)
            near = difflib.get_close_matches(wrong, names, n=1)
            return f"{message}; " + (
                f"did you mean {near[0]!r}?" if near else f"it has {', '.join(names)}"
            )
    return message
