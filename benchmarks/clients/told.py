"""What the scripted model and the checks of coding agents both know: the standard library only."""

from __future__ import annotations

COMMAND = "echo carousel-$((40+2))"  # that the model calls
RESULT = "carousel-42"  # of the command
ANSWER = "The shell has answered."  # of the model, when it has read the result or has no tools
